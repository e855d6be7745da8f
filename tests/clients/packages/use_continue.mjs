// The command `cn` of Continue without its tools, whose prompt is longer than the demo model's context.
// `node use_continue.mjs URL`, in the folder of its package, prints the lines that scenarios.py describes.
// dependencies: @continuedev/cli@1
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const names = ["@continuedev/cli"];
const version = (name) => JSON.parse(readFileSync(new URL(`node_modules/${name}/package.json`, import.meta.url))).version;
const prompt = "Tell me a story about a fox.";
const program = new URL("node_modules/.bin/cn", import.meta.url).pathname;

function chat(provider) {
  const home = mkdtempSync(join(tmpdir(), "continue-"));
  const model = {
    name: "Demo", provider, model: "demo", apiBase: `${process.argv[2]}/v1`, apiKey: "none", roles: ["chat"],
    defaultCompletionOptions: { maxTokens: 20, contextLength: 1024 },
  };
  const config = join(home, "config.yaml"); // JSON is YAML.
  writeFileSync(config, JSON.stringify({ name: "fox", version: "1.0.0", schema: "v1", models: [model] }));
  try {
    const env = { ...process.env, HOME: home, CONTINUE_TELEMETRY_ENABLED: "0" };
    const options = { env, encoding: "utf8", timeout: 120_000, stdio: ["ignore", "pipe", "pipe"] };
    assert(execFileSync(program, ["-p", prompt, "--config", config, "--exclude", "*"], options).trim());
  } finally {
    rmSync(home, { recursive: true });
  }
}

const scenarios = { vllm: () => chat("vllm"), openai: () => chat("openai") };
console.log(JSON.stringify({ versions: Object.fromEntries(names.map((name) => [name, version(name)])) }));
for (const [scenario, run] of Object.entries(scenarios)) {
  let error = null;
  try {
    run();
  } catch (caught) {
    error = String(caught.stack ?? caught) + (caught.stderr ?? "");
  }
  console.log(JSON.stringify({ scenario, error }));
}
