// Tokenizers, chat templates and sampling settings against Python's.
import assert from "node:assert/strict";
import { test } from "node:test";
import { checkSampling } from "../../src/settings/sampling.ts";
import { TextTokenizer } from "../../src/text/tokenizer.ts";
import { TokenTexts } from "../../src/text/token_texts.ts";
import { readFixture } from "../fixtures.mjs";
import { mentions } from "../mentions.mjs";

const tokenizers = await readFixture("tokenizers");
for (const { name, metadata, texts, ids, decoded, stopIds } of tokenizers.cases) {
  test(`tokenizer ${name}: ids and texts equal Python's`, () => {
    const tokenizer = TextTokenizer.fromGguf(new Map(Object.entries(metadata)), "test");
    assert.deepEqual(tokenizer.stopIds, stopIds);
    for (const [i, text] of texts.entries()) {
      assert.deepEqual(tokenizer.encode(text), ids[i], JSON.stringify(text));
      assert.equal(tokenizer.decode(ids[i]), decoded[i]);
    }
  });
}

const templates = await readFixture("templates");
for (const { name, source, prompt, text } of templates.cases) {
  test(`template ${name}, addGenerationPrompt=${prompt}: the text equals Python's, or both fail`, () => {
    const made = { ...tokenizers.cases[0].metadata, "tokenizer.chat_template": source };
    made["tokenizer.ggml.tokens"] = made["tokenizer.ggml.tokens"].with(1, "</s>");
    const tokenizer = TextTokenizer.fromGguf(new Map(Object.entries(made)), "test");
    const render = () => tokenizer.render(templates.messages, { addGenerationPrompt: prompt }, "test");
    // The only published template with integer keys, which the library does not support.
    if (name === "ByteDance-Seed-OSS") assert.throws(render, mentions("chat template", "Object keys must be strings"));
    else if (text === null) assert.throws(render, mentions("WhetError: test", "chat template"));
    else assert.equal(render(), text);
  });
}

test("messages without a template and unsupported tokenizers are rejected with the fix", () => {
  const metadata = new Map(Object.entries(tokenizers.cases[0].metadata));
  assert.throws(() => TextTokenizer.fromGguf(metadata, "f").render([], {}, "f"), mentions("WhetError: f", "chat template", "token ids"));
  const change = (key, value) => () => TextTokenizer.fromGguf(new Map([...metadata, [`tokenizer.ggml.${key}`, value]]), "f").encode("a");
  assert.throws(change("model", "bert"), mentions("tokenizer.ggml.model", "bert", "WordPiece", "token ids"));
  assert.throws(change("pre", "mine"), mentions("tokenizer.ggml.pre", "mine", "default"));
  assert.throws(change("eos_token_id", 1e6), mentions("eos_token_id", 1e6, metadata.get("tokenizer.ggml.tokens").length));
  assert.throws(change("tokens", ["a", "a"]), mentions("tokenizer.ggml.tokens", '"a"', "once"));
  assert.throws(change("merges", ["ab"]), mentions("tokenizer.ggml.merges", "ab"));
  assert.throws(change("token_type", [9]), mentions("token_type", "1 items", metadata.get("tokenizer.ggml.tokens").length));
});

test("decoders in which a token's text depends on its neighbours are rejected, entirely or for stop strings", () => {
  const read = (decoder, texts = ["a"]) => new TokenTexts(decoder, texts, [], "f");
  const metaspace = { type: "Metaspace", replacement: "\u2581", prepend_scheme: "always" };
  assert.equal(read(metaspace).noStopReason, undefined);
  mentions("leading spaces", "\u2581\u2581")(read(metaspace, ["\u2581\u2581"]).noStopReason);
  const strip = { type: "Strip", content: " ", start: 1, stop: 0 };
  assert.equal(read({ type: "Sequence", decoders: [{ type: "Fuse" }, strip] }).dropsFirstSpace, true);
  for (const decoders of [[strip], [{ type: "Fuse" }, { type: "ByteFallback" }], [metaspace, { type: "ByteFallback" }]]) {
    assert.throws(() => read({ type: "Sequence", decoders }), mentions("decoder", decoders.at(-1).type, "token ids"));
  }
});

test("sampling settings: accepts and rejects the same values as Python", async () => {
  for (const { name, value, isAccepted } of (await readFixture("settings")).cases) {
    if (value === null && isAccepted) continue;
    const check = () => checkSampling({ [name]: value, ...(name === "minNewTokens" ? { maxNewTokens: 128 } : {}) }, "f");
    if (isAccepted) check();
    else assert.throws(check, mentions(`WhetError: f: ${name} is`, "expected"), `${name}: ${JSON.stringify(value)}`);
  }
  assert.throws(() => checkSampling({ temperatur: 1 }, "f"), mentions("setting temperatur.", "temperature,"));
});
