// openai-node: chats and completions, whole and streamed; schemas, tools and errors.
//
// node openai_node.mjs URL FACTS

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";

const require = createRequire(resolve("package.json"));
const { default: OpenAI } = await import(pathToFileURL(require.resolve("openai")));
const [url, facts] = [process.argv[2], JSON.parse(process.argv[3])];
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const given = { model: "tiny", messages: facts.messages, seed: facts.seed, max_tokens: facts.max_tokens };

const answer = await client.chat.completions.create(given);
assert.equal(answer.choices[0].message.content, facts.text);
assert.equal(answer.choices[0].finish_reason, facts.finish);
assert.equal(answer.usage.completion_tokens, facts.n_tokens);

const stream = await client.chat.completions.create({ ...given, stream: true, stream_options: { include_usage: true } });
let text = "", usage;
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, facts.text);
assert.equal(usage.completion_tokens, facts.n_tokens);

const runner = client.chat.completions.stream(given);
assert.equal((await runner.finalChatCompletion()).choices[0].message.content, facts.text);

const aborted = await client.chat.completions.create({ ...given, max_tokens: 1000, stream: true });
for await (const chunk of aborted) {
  assert.ok(chunk.choices[0]);
  break; // ends the request
}

const schema = {
  type: "object", properties: { value: { enum: [1, 2] } }, required: ["value"], additionalProperties: false,
};
const free = { model: "tiny", messages: facts.messages };
const format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema } };
const formatted = await client.chat.completions.parse({ ...free, response_format: format });
assert.ok([1, 2].includes(JSON.parse(formatted.choices[0].message.content).value));

const tools = [{ type: "function", function: { name: "answer", parameters: schema, strict: true } }];
const called = await client.chat.completions.create({ ...free, tools, tool_choice: "required" });
const [call] = called.choices[0].message.tool_calls;
assert.equal(called.choices[0].finish_reason, "tool_calls");
assert.ok([1, 2].includes(JSON.parse(call.function.arguments).value));
const streamed = client.chat.completions.stream({ ...free, tools, tool_choice: "required" });
const [last] = (await streamed.finalChatCompletion()).choices[0].message.tool_calls;
assert.ok([1, 2].includes(JSON.parse(last.function.arguments).value));

const completion = await client.completions.create({
  model: "tiny", prompt: facts.prompt, echo: true, logprobs: 1, max_tokens: 1,
});
const values = completion.choices[0].logprobs.token_logprobs.slice(1, -1);
assert.ok(values.every((value, i) => Math.abs(value - facts.logprobs[i]) < 1e-6));

const models = [];
for await (const card of client.models.list()) models.push(card.id);
assert.deepEqual(models, ["tiny"]);
await assert.rejects(client.chat.completions.create({ ...given, model: "other" }), OpenAI.NotFoundError);
await assert.rejects(client.chat.completions.create({ ...given, max_tokens: 1e6 }), (error) =>
  error instanceof OpenAI.BadRequestError && error.code === "context_length_exceeded");
