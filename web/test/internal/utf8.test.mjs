// GGUF string arrays, against one TextDecoder call per string.
import assert from "node:assert/strict";
import { test } from "node:test";
import { readTexts } from "../../src/files/utf8.ts";

const encoder = new TextEncoder();

/** Encode strings with 64-bit length prefixes after three unrelated bytes. */
function encodeTexts(texts) {
  const bytes = texts.map((text) => (typeof text === "string" ? encoder.encode(text) : Uint8Array.from(text)));
  const encoded = new Uint8Array(3 + bytes.reduce((sum, each) => sum + 8 + each.length, 0));
  let at = 3;
  for (const each of bytes) {
    new DataView(encoded.buffer).setBigUint64(at, BigInt(each.length), true);
    encoded.set(each, at + 8);
    at += 8 + each.length;
  }
  return encoded;
}

test("strings of every Unicode plane, empty strings and byte order marks", () => {
  const texts = ["", "a", "\u0120the", "\ufeff", "\ufeffx", "\u4f60\u597d", "\u{1f600}\u{1f601}", "", "\0", "\n\n", "\u00e9".repeat(40)];
  assert.deepEqual(readTexts(encodeTexts(texts), 3, texts.length), texts);
  assert.deepEqual(readTexts(encodeTexts([]), 3, 0), []);
  const random = Array.from({ length: 5000 }, (_, i) => String.fromCodePoint(...Array.from({ length: i % 7 }, (_, k) => 0x10000 + ((i * 7919 + k * 104729) % 0xfffff), 97 + (i % 26))));
  assert.deepEqual(readTexts(encodeTexts(random), 3, random.length), random);
});

test("invalid UTF-8 affects only its own string, even if neighbours complete a character", () => {
  const halves = [[0x61, 0xe2, 0x82], [0xac, 0x62], "after"];
  const expected = halves.map((each) => (typeof each === "string" ? each : new TextDecoder().decode(Uint8Array.from(each))));
  assert.deepEqual(readTexts(encodeTexts(halves), 3, 3), expected);
  assert.deepEqual(readTexts(encodeTexts(["a", [0xff], "b"]), 3, 3), ["a", "\ufffd", "b"]);
  assert.deepEqual(readTexts(encodeTexts(["a", [0xc3], [0xa9], "b"]), 3, 4), ["a", "\ufffd", "\ufffd", "b"]);
});
