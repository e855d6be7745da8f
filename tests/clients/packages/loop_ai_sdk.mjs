// The AI SDK with `openai()`, which uses the Responses API, and with @ai-sdk/anthropic.
// `node loop_ai_sdk.mjs URL`, in the folder of these packages, prints the lines that scenarios.py describes.
// dependencies: ai@>=6 @ai-sdk/openai@>=3 @ai-sdk/anthropic@>=3 zod@4
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { APICallError, generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { call, run, say, url } from "./scenarios.mjs";

const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const anthropic = createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" });
const responses = openai("demo"), messages = anthropic("demo");
// By default the SDK refers to items of earlier responses, which the server does not store.
const whole = { providerOptions: { openai: { store: false } }, maxRetries: 0, maxOutputTokens: 300 };
const answer = "It is warmer in Rome.";
const results = {
  Rome: `25 degrees ${say(call("weather", { city: "Oslo" }))}`,
  Oslo: `5 degrees ${say(answer)}`,
};
const weather = tool({
  description: "Return the weather of a city.",
  inputSchema: z.strictObject({ city: z.enum(["Rome", "Oslo"]) }),
  execute: async ({ city }) => results[city],
});
const question = {
  prompt: `Is it warmer in Rome or in Oslo? ${say(`I look.${call("weather", { city: "Rome" })}`)}`,
  tools: { weather }, stopWhen: stepCountIs(5),
};

async function loop(model) {
  for (const send of [generateText, streamText]) {
    const errors = [];
    const result = await send({ model, ...question, ...whole, onError: ({ error }) => errors.push(error) });
    if (send === streamText) await result.consumeStream();
    assert.deepEqual(errors, []);
    const steps = await result.steps, calls = steps.flatMap((step) => step.toolCalls);
    assert.deepEqual(calls.map((each) => [each.toolName, each.input.city]), [["weather", "Rome"], ["weather", "Oslo"]]);
    assert.deepEqual(steps.map((step) => step.text), ["I look.", "", answer]);
    assert((await result.totalUsage).outputTokens > 0);
  }
}

async function structured(model) {
  const request = { model, ...whole, prompt: say('{"city": "Rome"}'), schema: z.strictObject({ city: z.string() }) };
  assert.deepEqual((await generateObject(request)).object, { city: "Rome" });
}

function rejects(request, status, words) {
  return assert.rejects(generateText({ prompt: "Hi", maxRetries: 0, ...request }), (error) => {
    return APICallError.isInstance(error) && error.statusCode === status && error.message.includes(words);
  });
}

const scenarios = {
  loop_of_responses: () => loop(responses),
  loop_of_messages: () => loop(messages),
  structured_response: () => structured(responses),
  structured_message: () => structured(messages),
  stored_response: () => rejects({ model: responses, ...question }, 400, "send store: false"),
  errors: async () => {
    await rejects({ model: openai("none"), ...whole }, 404, "is not served here");
    await rejects({ model: anthropic("none"), ...whole }, 404, "is not served here");
    await rejects({ model: responses, ...whole, temperature: -1 }, 400, "temperature: must be");
  },
};
await run(["ai", "@ai-sdk/openai", "@ai-sdk/anthropic"], scenarios);
