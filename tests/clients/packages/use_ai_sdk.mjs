// The AI SDK with @ai-sdk/openai-compatible and @ai-sdk/openai (chats and completions).
// `node use_ai_sdk.mjs URL`, in the folder of these packages, prints the lines that scenarios.py describes.
// dependencies: ai@>=6 @ai-sdk/openai@>=3 @ai-sdk/openai-compatible@>=2 zod@4
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, embed, generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";
import { run, url } from "./scenarios.mjs";

const many = 900; // Generating so many tokens takes seconds.
const prompt = "Tell me a story about a fox.";
const baseURL = `${url}/v1`;
const compatible = createOpenAICompatible({
  name: "jpaged", baseURL, apiKey: "none", includeUsage: true, supportsStructuredOutputs: true,
  // A field that only this server has; the SDK's options do not reach it.
  transformRequestBody: (body) => (body.max_tokens === many ? { ...body, ignore_eos: true } : body),
});
const openai = createOpenAI({ baseURL, apiKey: "none" });
const models = [compatible("demo"), openai.chat("demo")];
const options = { prompt, maxRetries: 0, maxOutputTokens: 20 };
const mood = z.strictObject({ mood: z.enum(["happy", "sad"]) });

async function metric(name) {
  const lines = (await (await fetch(`${url}/metrics`)).text()).split("\n").filter((line) => line.startsWith(name));
  return lines.reduce((sum, line) => sum + Number(line.split(" ").at(-1)), 0);
}

const scenarios = {
  async chat() {
    for (const model of models) {
      const { text, usage } = await generateText({ model, ...options });
      assert(text && usage.outputTokens <= 20);
    }
  },
  async completion() {
    for (const model of [compatible.completionModel("demo"), openai.completion("demo")])
      assert((await generateText({ model, ...options })).text);
  },
  async stream() {
    for (const model of models) {
      const result = streamText({ model, ...options });
      let text = "";
      for await (const part of result.textStream) text += part;
      assert(text && (await result.usage).outputTokens <= 20);
    }
  },
  async tool_loop() {
    for (const model of models)
      for (const send of [generateText, streamText]) {
        const weather = tool({
          description: "Return the weather of a city.",
          inputSchema: z.strictObject({ city: z.enum(["Paris", "Rome"]) }),
          execute: async ({ city }) => `It is sunny in ${city}.`,
        });
        const result = await send({
          model, ...options, maxOutputTokens: 300, tools: { weather }, stopWhen: stepCountIs(2),
          prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : { type: "tool", toolName: "weather" } }),
        });
        if (send === streamText) await result.consumeStream();
        const [first, second] = await result.steps;
        assert(first.toolResults[0].output.startsWith("It is sunny in") && second.text);
      }
  },
  async structured() {
    for (const model of models) {
      const request = { model, ...options, maxOutputTokens: 300, schema: mood };
      mood.parse((await generateObject(request)).object);
      const streamed = streamObject(request);
      for await (const part of streamed.partialObjectStream) assert(part);
      mood.parse(await streamed.object);
    }
  },
  async reasoning_effort() {
    const settings = { reasoningEffort: "low", textVerbosity: "low" };
    for (const model of models)
      assert((await generateText({ model, ...options, providerOptions: { jpaged: settings, openai: settings } })).text);
  },
  async embedding() {
    for (const model of [compatible.embeddingModel("demo"), openai.embedding("demo")])
      assert((await embed({ model, value: prompt, maxRetries: 0 })).embedding.length > 1);
  },
  async errors() {
    for (const model of models)
      await assert.rejects(generateText({ model, ...options, temperature: -1 }), (error) => {
        return APICallError.isInstance(error) && error.statusCode === 400 && /temperature: must/.test(error.message);
      });
  },
  async cancel() {
    const before = await metric("vllm:generation_tokens_total");
    const stop = new AbortController();
    const result = streamText({ model: models[0], ...options, maxOutputTokens: many, abortSignal: stop.signal });
    for await (const part of result.textStream) {
      assert(part);
      break;
    }
    stop.abort();
    while (await metric("vllm:num_requests_running")) await new Promise((resolve) => setTimeout(resolve, 20));
    const generated = (await metric("vllm:generation_tokens_total")) - before;
    assert(generated > 0 && generated < many, `${generated} tokens were generated`);
  },
};

await run(["ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible"], scenarios);
