/** The bytes that each token decodes to, for streaming text token by token. */
import { WhetError } from "../core/errors.js";
import type { AddedToken, TokenizerJson } from "./vocabulary.js";

type Step = (text: string) => string | Uint8Array;

const encoder = new TextEncoder();
const NOTHING = new Uint8Array(0);

/** GPT-2's byte alphabet: printable Latin-1 characters stand for their bytes, 256, 257, ... for the other bytes. */
const BYTES = (() => {
  const found = new Map<string, number>();
  let others = 256;
  for (let byte = 0; byte < 256; ++byte) {
    const isPrintable = (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
    found.set(String.fromCharCode(isPrintable ? byte : others++), byte);
  }
  return found;
})();

const STEPS: Record<string, (part: any) => Step> = {
  ByteLevel: () => (text) => {
    const bytes = [...text].map((character) => BYTES.get(character));
    return bytes.includes(undefined) ? text : Uint8Array.from(bytes as number[]); // another character: plain text
  },
  ByteFallback: () => (text) => {
    const byte = /^<0x([0-9A-Fa-f]{2})>$/.exec(text);
    return byte === null ? text : Uint8Array.of(parseInt(byte[1], 16));
  },
  Replace: (part) => (text) => text.replaceAll(part.pattern.String, part.content),
  Metaspace: (part) => (text) => text.replaceAll(part.replacement, " "),
};

/** A tokenizer.json's decoder as steps that apply to each token independently. */
export class TokenTexts {
  private readonly steps: Step[] = [];
  readonly dropsFirstSpace: boolean = false;
  private readonly texts: string[];
  private readonly specialIds: ReadonlySet<number>;
  /** Ids of special tokens by name. */
  private readonly special = new Map<string, number>();
  /** Reason why stop strings cannot be found in the texts of single tokens; undefined if they can. */
  readonly noStopReason: string | undefined;

  /** `decoder`: as in tokenizer.json; `texts`: by the ids of tokens. */
  constructor(decoder: TokenizerJson | null, texts: readonly string[], added: readonly AddedToken[], where: string) {
    let isFused = false;
    for (const part of decoder?.type === "Sequence" ? decoder.decoders : decoder === null ? [] : [decoder]) {
      const isFirstSpace = isFused && part.type === "Strip" && part.content === " " && part.start === 1 && part.stop === 0;
      const isLate = this.dropsFirstSpace || isFused; // a step after one on the whole text does not apply to single tokens
      if (isFirstSpace || (part.type === "Metaspace" && part.prepend_scheme !== "never")) this.dropsFirstSpace = true;
      if (isFirstSpace) continue;
      if (part.type === "Fuse") {
        isFused = true;
        continue;
      }
      const step = STEPS[part.type];
      if (step === undefined || isLate || (part.type === "Replace" && typeof part.pattern?.String !== "string")) {
        throw new WhetError(`${where}: the tokenizer's decoder has the step ${part.type}, which is not supported. Pass prompts as token ids and decode with your own tokenizer.`);
      }
      this.steps.push(step(part));
    }
    this.texts = [...texts];
    for (const { id, content, special } of added) {
      this.texts[id] = content;
      if (special) this.special.set(content, id);
    }
    this.specialIds = new Set(this.special.values());
    const space = decoder?.type === "Metaspace" && this.dropsFirstSpace ? decoder.replacement : undefined;
    const several = space === undefined ? undefined : this.texts.find((text) => text?.includes(space, 1));
    if (several !== undefined) this.noStopReason = `its decoder drops all leading spaces of ${JSON.stringify(several)}, but only at the beginning of a text`;
  }

  /** Return the ids of the special tokens among these strings. */
  findSpecial(strings: readonly string[]): number[] {
    return strings.flatMap((text) => this.special.get(text) ?? []);
  }

  /** Concatenate the bytes of all tokens; return them and the end of each. */
  concatenate(): { bytes: Uint8Array; ends: Int32Array } {
    const all = Array.from(this.texts, (_, id) => this.bytesOf(id));
    const ends = new Int32Array(all.length);
    all.reduce((end, { length }, id) => (ends[id] = end + length), 0);
    const bytes = new Uint8Array(ends.at(-1) ?? 0);
    for (const [id, each] of all.entries()) bytes.set(each, ends[id] - each.length);
    return { bytes, ends };
  }

  /** Return a token's bytes within a text; none for special and unknown tokens. */
  bytesOf(token: number): Uint8Array {
    const text = this.texts[token];
    if (text === undefined || this.specialIds.has(token)) return NOTHING;
    let decoded: string | Uint8Array = text;
    for (const step of this.steps) if (typeof decoded === "string") decoded = step(decoded);
    return typeof decoded === "string" ? encoder.encode(decoded) : decoded;
  }
}

/** Streaming decoder of tokens; invalid UTF-8 becomes U+FFFD. */
export class TextStream {
  private readonly decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  private isEmpty = true;
  private pending: Uint8Array = NOTHING;

  constructor(private readonly texts: TokenTexts) {}

  /** Append a token and return the characters that are final. The last `nWithheld` bytes are not; `isLast` flushes the rest. */
  add(token: number, nWithheld: number, isLast: boolean): string {
    let bytes = this.texts.bytesOf(token);
    if (this.isEmpty && bytes.length > 0) {
      this.isEmpty = false;
      if (this.texts.dropsFirstSpace && bytes[0] === 0x20) bytes = bytes.subarray(1);
    }
    const all = this.pending.length > 0 ? Uint8Array.of(...this.pending, ...bytes) : bytes;
    const nFinal = all.length - nWithheld;
    this.pending = all.subarray(nFinal);
    return this.decoder.decode(all.subarray(0, nFinal), { stream: !isLast });
  }
}
