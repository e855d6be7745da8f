// Claude Code with Anthropic's messages. It reads two files, whose texts are the scripts of the turns that follow.
// `node loop_claude_code.mjs URL`, in the folder of its package, prints the lines that scenarios.py describes.
// npm warns that this version needs a newer Node, but it is a program of its own.
// dependencies: @anthropic-ai/claude-code@>=2.1.332
import assert from "node:assert/strict";
import { mkdirSync, realpathSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { call, inFolder, lines, program, run, say, url } from "./scenarios.mjs";

const settings = {
  ANTHROPIC_BASE_URL: url, ANTHROPIC_API_KEY: "none", ANTHROPIC_MODEL: "demo", ANTHROPIC_DEFAULT_HAIKU_MODEL: "demo",
  CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1", CLAUDE_CODE_MAX_RETRIES: "0",
};
const answer = "It is warmer in Rome.";

/** Call a function with a folder that has the scripts, functions that run `claude` in it and return a call that reads
 * one of its files, and the prompt of the first turn. */
function withClaude(use) {
  return inFolder((folder) => {
    const home = join(folder, "home"), cwd = join(realpathSync(folder), "work");
    for (const made of [home, cwd]) mkdirSync(made);
    const read = (name) => call("Read", { file_path: join(cwd, name) });
    writeFileSync(join(cwd, "rome.txt"), `25 degrees ${say(read("oslo.txt"))}\n`);
    writeFileSync(join(cwd, "oslo.txt"), `5 degrees ${say(answer)}\n`);
    const env = { PATH: process.env.PATH, HOME: home, CLAUDE_CONFIG_DIR: join(home, ".claude"), ...settings };
    const flags = ["--output-format", "stream-json", "--verbose"];
    const claude = (...args) => program("claude", [...args, ...flags], { cwd, env });
    const prompt = `Is it warmer in Rome or in Oslo? ${say(`I look.\n${read("rome.txt")}`)}`;
    return use({ cwd, claude, read, prompt });
  });
}

/** Return the blocks of the messages of a role. */
function blocks(events, role) {
  return events.filter((event) => event.type === role).flatMap((event) => event.message.content);
}

const scenarios = {
  loop: () =>
    withClaude(async ({ claude, prompt }) => {
      const events = lines(await claude("-p", prompt)), said = blocks(events, "assistant");
      const texts = said.filter((block) => block.type === "text").map((block) => block.text);
      assert.deepEqual(texts, ["I look.", answer]);
      const used = said.filter((block) => block.type === "tool_use").map((block) => block.name);
      assert.deepEqual(used, ["Read", "Read"]);
      const results = blocks(events, "user").filter((block) => block.type === "tool_result");
      assert(results.length === 2 && results.every((block) => !block.is_error && block.content.includes("5 degrees")));
      const { subtype, is_error, num_turns, result, usage } = events.at(-1);
      assert.deepEqual([subtype, is_error, num_turns, result], ["success", false, 3, answer]);
      assert(usage.output_tokens > 0 && usage.cache_read_input_tokens > 0);
    }),
  resume: () =>
    withClaude(async ({ claude, prompt }) => {
      lines(await claude("-p", prompt));
      const events = lines(await claude("--continue", "-p", `And now? ${say("Still in Rome.")}`));
      assert.equal(events.at(-1).result, "Still in Rome.");
    }),
  tool_search: () =>
    withClaude(async ({ cwd, claude, read }) => {
      writeFileSync(join(cwd, "next.txt"), say(`${call("CronList", {})} ${read("oslo.txt")}`));
      const prompt = say(`${call("ToolSearch", { query: "select:CronList" })}\n${read("next.txt")}`);
      const events = lines(await claude("-p", prompt));
      const results = blocks(events, "user").filter((block) => block.type === "tool_result");
      assert.deepEqual(results[0].content, [{ type: "tool_reference", tool_name: "CronList" }]);
      assert(results.length === 4 && results.every((block) => !block.is_error), JSON.stringify(results));
      assert.equal(blocks(events, "assistant").at(-1).text, answer);
    }),
  structured: () =>
    withClaude(async ({ claude }) => {
      const city = { type: "string", enum: ["Rome", "Oslo"] };
      const schema = { type: "object", properties: { city }, required: ["city"], additionalProperties: false };
      const prompt = `Which is warmer? ${say(call("StructuredOutput", { city: "Rome" }))}`;
      const events = lines(await claude("-p", prompt, "--json-schema", JSON.stringify(schema)));
      assert.deepEqual(events.at(-1).structured_output, { city: "Rome" });
    }),
  errors: () =>
    withClaude(async ({ claude }) => {
      const { stdout, code } = await claude("--model", "none", "-p", "Hi");
      const { is_error, api_error_status } = JSON.parse(stdout.trim().split("\n").at(-1));
      assert(code !== 0 && is_error && api_error_status === 404, stdout);
    }),
};
await run(["@anthropic-ai/claude-code"], scenarios);
