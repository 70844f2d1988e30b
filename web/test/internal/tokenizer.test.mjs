// Tokenizers, chat templates and settings against what Python makes of the same.
import assert from "node:assert/strict";
import { test } from "node:test";
import { checkSampling } from "../../src/sampling.ts";
import { TextTokenizer } from "../../src/tokenizer.ts";
import { TokenTexts } from "../../src/token_texts.ts";
import { readFixture } from "../fixtures.mjs";

const tokenizers = await readFixture("tokenizers");
for (const { name, metadata, texts, ids, decoded, stopIds } of tokenizers.cases) {
  test(`tokenizer ${name}: ids and texts are Python's`, () => {
    const tokenizer = TextTokenizer.ofGguf(new Map(Object.entries(metadata)), "test");
    assert.deepEqual(tokenizer.stopIds, stopIds);
    for (const [i, text] of texts.entries()) {
      assert.deepEqual(tokenizer.encode(text), ids[i], JSON.stringify(text));
      assert.equal(tokenizer.decode(ids[i]), decoded[i]);
    }
  });
}

const templates = await readFixture("templates");
for (const { name, source, prompt, text } of templates.cases) {
  test(`template ${name}, addGenerationPrompt=${prompt}: the text is Python's, or there is none`, () => {
    const made = { ...tokenizers.cases[0].metadata, "tokenizer.chat_template": source };
    made["tokenizer.ggml.tokens"] = made["tokenizer.ggml.tokens"].with(1, "</s>");
    const tokenizer = TextTokenizer.ofGguf(new Map(Object.entries(made)), "test");
    const render = () => tokenizer.render(templates.messages, { addGenerationPrompt: prompt }, "test");
    // The one published template with a table by numbers, which the library does not know: a clear error.
    if (name === "ByteDance-Seed-OSS") assert.throws(render, /cannot render these messages \(Object keys must be strings/);
    else if (text === null) assert.throws(render, /the chat template cannot render these messages/);
    else assert.equal(render(), text);
  });
}

test("without a template messages are refused, and a tokenizer that is not read says what to do", () => {
  const metadata = new Map(Object.entries(tokenizers.cases[0].metadata));
  assert.throws(() => TextTokenizer.ofGguf(metadata, "f").render([], {}, "f"), /^WhetError: f: the model has no chat template. Give the prompt as a text/);
  const change = (key, value) => () => TextTokenizer.ofGguf(new Map([...metadata, [`tokenizer.ggml.${key}`, value]]), "f").encode("a");
  assert.throws(change("model", "bert"), /tokenizer.ggml.model is "bert", which is WordPiece.*Give prompts as token ids/);
  assert.throws(change("pre", "mine"), /pre is "mine", expected a pre-tokenizer that is known, such as default/);
  assert.throws(change("eos_token_id", 1e6), /eos_token_id is 1000000, expected one of the \d+ tokens/);
  assert.throws(change("tokens", ["a", "a"]), /each token once/);
  assert.throws(change("merges", ["ab"]), /merges is "ab", expected two tokens/);
  assert.throws(change("token_type", [9]), /token_type is "1 items"/);
});

test("decoders by whose steps a token's text depends on its neighbours are refused, for stop strings or altogether", () => {
  const read = (decoder, texts = ["a"]) => new TokenTexts(decoder, texts, [], "f");
  const metaspace = { type: "Metaspace", replacement: "\u2581", prepend_scheme: "always" };
  assert.equal(read(metaspace).whyNoStop, undefined);
  assert.match(read(metaspace, ["\u2581\u2581"]).whyNoStop, /leaves out all spaces in the beginning of a text/);
  const strip = { type: "Strip", content: " ", start: 1, stop: 0 };
  assert.equal(read({ type: "Sequence", decoders: [{ type: "Fuse" }, strip] }).dropsFirstSpace, true);
  for (const decoders of [[strip], [{ type: "Fuse" }, { type: "ByteFallback" }], [metaspace, { type: "ByteFallback" }]]) {
    assert.throws(() => read({ type: "Sequence", decoders }), /the tokenizer's decoder has the step \w+, which this package does not read/);
  }
});

test("settings: Python takes and refuses the same values", async () => {
  for (const { name, value, isTaken } of (await readFixture("settings")).cases) {
    if (value === null && isTaken) continue;
    const check = () => checkSampling({ [name]: value, ...(name === "minNewTokens" ? { maxNewTokens: 128 } : {}) }, "f");
    if (isTaken) check();
    else assert.throws(check, new RegExp(`^WhetError: f: ${name} is .*, expected `), `${name}: ${JSON.stringify(value)}`);
  }
  assert.throws(() => checkSampling({ temperatur: 1 }, "f"), /there is no setting temperatur. There are: temperature/);
});
