// Arrays of texts as GGUF has them, against a call of TextDecoder for each.
import assert from "node:assert/strict";
import { test } from "node:test";
import { readTexts } from "../../src/texts.ts";

const encoder = new TextEncoder();

/** Rows of a length in 64 bits and so many bytes, behind three others. */
function rowsOf(texts) {
  const bytes = texts.map((text) => (typeof text === "string" ? encoder.encode(text) : Uint8Array.from(text)));
  const rows = new Uint8Array(3 + bytes.reduce((sum, each) => sum + 8 + each.length, 0));
  let at = 3;
  for (const each of bytes) {
    new DataView(rows.buffer).setBigUint64(at, BigInt(each.length), true);
    rows.set(each, at + 8);
    at += 8 + each.length;
  }
  return rows;
}

test("texts of every plane, empty ones and byte order marks", () => {
  const texts = ["", "a", "\u0120the", "\ufeff", "\ufeffx", "\u4f60\u597d", "\u{1f600}\u{1f601}", "", "\0", "\n\n", "\u00e9".repeat(40)];
  assert.deepEqual(readTexts(rowsOf(texts), 3, texts.length), texts);
  assert.deepEqual(readTexts(rowsOf([]), 3, 0), []);
  const random = Array.from({ length: 5000 }, (_, i) => String.fromCodePoint(...Array.from({ length: i % 7 }, (_, k) => 0x10000 + ((i * 7919 + k * 104729) % 0xfffff), 97 + (i % 26))));
  assert.deepEqual(readTexts(rowsOf(random), 3, random.length), random);
});

test("bytes that are no UTF-8 spoil their own text only, also where two halves would make a character", () => {
  const halves = [[0x61, 0xe2, 0x82], [0xac, 0x62], "after"];
  const expected = halves.map((each) => (typeof each === "string" ? each : new TextDecoder().decode(Uint8Array.from(each))));
  assert.deepEqual(readTexts(rowsOf(halves), 3, 3), expected);
  assert.deepEqual(readTexts(rowsOf(["a", [0xff], "b"]), 3, 3), ["a", "\ufffd", "b"]);
  assert.deepEqual(readTexts(rowsOf(["a", [0xc3], [0xa9], "b"]), 3, 4), ["a", "\ufffd", "\ufffd", "b"]);
});
