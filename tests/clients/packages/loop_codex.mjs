// Codex with the Responses API. Its commands read two files, whose texts are the scripts of the turns that follow.
// `node loop_codex.mjs URL`, in the folder of its package, prints the lines that scenarios.py describes.
// dependencies: @openai/codex@0
import assert from "node:assert/strict";
import { mkdirSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { call, inFolder, lines, program, run, say, url } from "./scenarios.mjs";

const config = `
model = "demo"
model_provider = "jpaged"
[model_providers.jpaged]
name = "jpaged"
base_url = "${url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
[analytics]
enabled = false
`;
// An MCP server with one tool, whose result has the script of the turn that follows.
const sky = `
import { createInterface } from "node:readline";
const tool = { name: "weather", description: "Return the weather.", inputSchema: { type: "object", properties: {} } };
const serverInfo = { name: "sky", version: "1" };
const results = {
  initialize: ({ protocolVersion }) => ({ protocolVersion, capabilities: { tools: {} }, serverInfo }),
  "tools/list": () => ({ tools: [tool] }),
  "tools/call": () => ({ content: [{ type: "text", text: "windy ${say("It is windy.")}" }] }),
};
createInterface({ input: process.stdin }).on("line", (line) => {
  const { id, method, params } = JSON.parse(line);
  if (id !== undefined) console.log(JSON.stringify({ jsonrpc: "2.0", id, result: results[method]?.(params) ?? {} }));
});
`;
const answer = "It is warmer in Rome.";
const commands = ["cat rome.txt", "cat oslo.txt"];

/** Call a function with one that runs `codex exec` in a folder with the scripts. */
function withCodex(use) {
  return inFolder((folder) => {
    const home = join(folder, "home"), cwd = join(folder, "work");
    for (const made of [home, cwd]) mkdirSync(made);
    writeFileSync(join(home, "config.toml"), config);
    writeFileSync(join(cwd, "rome.txt"), `25 degrees ${say(call("exec_command", { cmd: commands[1] }))}\n`);
    writeFileSync(join(cwd, "oslo.txt"), `5 degrees ${say(answer)}\n`);
    const env = { PATH: process.env.PATH, HOME: home, CODEX_HOME: home };
    // The scripts fix the commands. Codex's sandbox needs rights that containers lack.
    const flags = ["--json", "--skip-git-repo-check", "--sandbox", "danger-full-access"];
    return use((...args) => program("codex", ["exec", ...flags, ...args], { cwd, env }), cwd);
  });
}

function completed(events) {
  return events.filter((event) => event.type === "item.completed").map((event) => event.item);
}

const prompt = `Is it warmer in Rome or in Oslo? ${say(`I look.\n${call("exec_command", { cmd: commands[0] })}`)}`;
const scenarios = {
  loop: () =>
    withCodex(async (codex) => {
      const events = lines(await codex(prompt)), items = completed(events);
      const texts = items.filter((item) => item.type === "agent_message").map((item) => item.text);
      assert.deepEqual(texts, ["I look.", answer]);
      const runs = items.filter((item) => item.type === "command_execution");
      assert.equal(runs.length, 2);
      for (const [index, done] of runs.entries()) {
        assert(done.command.includes(commands[index]), done.command);
        assert(done.exit_code === 0 && done.aggregated_output.includes("5 degrees"));
      }
      const { type, usage } = events.at(-1);
      assert(type === "turn.completed" && usage.output_tokens > 0 && usage.cached_input_tokens > 0);
    }),
  resume: () =>
    withCodex(async (codex) => {
      lines(await codex(prompt));
      const items = completed(lines(await codex("resume", "--last", `And now? ${say("Still in Rome.")}`)));
      assert.equal(items.at(-1).text, "Still in Rome.");
    }),
  structured: () =>
    withCodex(async (codex, cwd) => {
      const city = { type: "string", enum: ["Rome", "Oslo"] };
      const schema = { type: "object", properties: { city }, required: ["city"], additionalProperties: false };
      writeFileSync(join(cwd, "schema.json"), JSON.stringify(schema));
      const prompt = `Which is warmer? ${say('{"city": "Rome"}')}`;
      const items = completed(lines(await codex("--output-schema", "schema.json", prompt)));
      assert.deepEqual(JSON.parse(items.at(-1).text), { city: "Rome" });
    }),
  goal: () =>
    withCodex(async (codex, cwd) => {
      // Codex adds the goal to the results, as the result of no call.
      const calls = (...each) => say(each.join("\n")), cat = (name) => call("exec_command", { cmd: `cat ${name}` });
      writeFileSync(join(cwd, "end.txt"), calls(call("update_goal", { status: "complete" }), cat("oslo.txt")));
      const prompt = calls(call("create_goal", { objective: "Find the warmer city." }), cat("end.txt"));
      assert.equal(completed(lines(await codex(`Which is warmer? ${prompt}`))).at(-1).text, answer);
    }),
  mcp: () =>
    withCodex(async (codex, cwd) => {
      const path = join(cwd, "sky.mjs");
      writeFileSync(path, sky);
      const server = ["--config", `mcp_servers.sky={command="${process.execPath}",args=["${path}"]}`];
      const items = completed(lines(await codex(...server, `How is it? ${say(call("mcp__sky__weather", {}))}`)));
      const [used] = items.filter((item) => item.type === "mcp_tool_call");
      assert.deepEqual([used.server, used.tool, used.status], ["sky", "weather", "completed"]);
      assert.equal(items.at(-1).text, "It is windy.");
    }),
  errors: () =>
    withCodex(async (codex) => {
      const { stdout, code } = await codex("--model", "none", "Hi");
      assert(code !== 0 && stdout.includes("is not served here"), stdout);
    }),
};
await run(["@openai/codex"], scenarios);
