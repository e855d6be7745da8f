// The command `cn` of Continue without its tools, whose prompt is longer than the demo model's context.
// `node use_continue.mjs URL`, in the folder of its package, prints the lines that scenarios.py describes.
// dependencies: @continuedev/cli@1
import assert from "node:assert/strict";
import { writeFileSync } from "node:fs";
import { join } from "node:path";
import { inFolder, program, run, url } from "./scenarios.mjs";

const prompt = "Tell me a story about a fox.";

function chat(provider) {
  return inFolder(async (home) => {
    const model = {
      name: "Demo", provider, model: "demo", apiBase: `${url}/v1`, apiKey: "none", roles: ["chat"],
      defaultCompletionOptions: { maxTokens: 20, contextLength: 1024 },
    };
    const config = join(home, "config.yaml"); // JSON is YAML.
    writeFileSync(config, JSON.stringify({ name: "fox", version: "1.0.0", schema: "v1", models: [model] }));
    const env = { ...process.env, HOME: home, CONTINUE_TELEMETRY_ENABLED: "0" };
    const { stdout, stderr, code } = await program("cn", ["-p", prompt, "--config", config, "--exclude", "*"], { env });
    assert(code === 0 && stdout.trim(), stdout + stderr);
  });
}

await run(["@continuedev/cli"], { vllm: () => chat("vllm"), openai: () => chat("openai") });
