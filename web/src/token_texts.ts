/** The bytes that each token of a tokenizer decodes to: text is told apart from tokens one by one. */
import { WhetError } from "./errors.js";
import type { AddedToken, TokenizerJson } from "./vocabulary.js";

type Step = (text: string) => string | Uint8Array;

const encoder = new TextEncoder();
const NOTHING = new Uint8Array(0);

/** GPT-2's characters of bytes: printable ones of Latin-1 for themselves, 256, 257, ... for the others. */
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
    return bytes.includes(undefined) ? text : Uint8Array.from(bytes as number[]); // with another character it is text as it stands
  },
  ByteFallback: () => (text) => {
    const byte = /^<0x([0-9A-Fa-f]{2})>$/.exec(text);
    return byte === null ? text : Uint8Array.of(parseInt(byte[1], 16));
  },
  Replace: (part) => (text) => text.replaceAll(part.pattern.String, part.content),
  Metaspace: (part) => (text) => text.replaceAll(part.replacement, " "),
};

/** Reads a tokenizer.json's decoder as steps of which each says what a token becomes whatever its neighbours are. */
export class TokenTexts {
  private readonly steps: Step[] = [];
  readonly dropsFirstSpace: boolean = false;
  private readonly texts: string[];
  private readonly specialIds: ReadonlySet<number>;
  /** Ids of special tokens, by their names. */
  private readonly special = new Map<string, number>();
  /** What keeps stop strings from being found in the texts of tokens one by one; undefined: nothing. */
  readonly whyNoStop: string | undefined;

  /** `decoder`: as in tokenizer.json; `texts`: by the ids of tokens. */
  constructor(decoder: TokenizerJson | null, texts: readonly string[], added: readonly AddedToken[], where: string) {
    let isFused = false;
    for (const part of decoder?.type === "Sequence" ? decoder.decoders : decoder === null ? [] : [decoder]) {
      const isFirstSpace = isFused && part.type === "Strip" && part.content === " " && part.start === 1 && part.stop === 0;
      const isLate = this.dropsFirstSpace || isFused; // what comes behind a change of the whole text is of no single token
      if (isFirstSpace || (part.type === "Metaspace" && part.prepend_scheme !== "never")) this.dropsFirstSpace = true;
      if (isFirstSpace) continue;
      if (part.type === "Fuse") {
        isFused = true;
        continue;
      }
      const step = STEPS[part.type];
      if (step === undefined || isLate || (part.type === "Replace" && typeof part.pattern?.String !== "string")) {
        throw new WhetError(`${where}: the tokenizer's decoder has the step ${part.type}, which this package does not read. Give prompts as token ids, and decode by your own tokenizer.`);
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
    if (several !== undefined) this.whyNoStop = `of ${JSON.stringify(several)} its decoder leaves out all spaces in the beginning of a text, and no others`;
  }

  /** The special tokens that some of these strings name. */
  specialAmong(strings: readonly string[]): number[] {
    return strings.flatMap((text) => this.special.get(text) ?? []);
  }

  /** The bytes of all tokens, end to end, and where each ends. */
  join(): { bytes: Uint8Array; ends: Int32Array } {
    const all = Array.from(this.texts, (_, id) => this.bytesOf(id));
    const ends = new Int32Array(all.length);
    all.reduce((end, { length }, id) => (ends[id] = end + length), 0);
    const bytes = new Uint8Array(ends.at(-1) ?? 0);
    for (const [id, each] of all.entries()) bytes.set(each, ends[id] - each.length);
    return { bytes, ends };
  }

  /** A token's bytes within a text; special tokens have none, nor has a token that the tokenizer lacks. */
  bytesOf(token: number): Uint8Array {
    const text = this.texts[token];
    if (text === undefined || this.specialIds.has(token)) return NOTHING;
    let said: string | Uint8Array = text;
    for (const step of this.steps) if (typeof said === "string") said = step(said);
    return typeof said === "string" ? encoder.encode(said) : said;
  }
}

/** The text of tokens that come one by one; what is no UTF-8 becomes U+FFFD. */
export class TextStream {
  private readonly decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  private isEmpty = true;
  private waiting: Uint8Array = NOTHING;

  constructor(private readonly texts: TokenTexts) {}

  /** The whole characters that a token makes certain, where the last `held` bytes are not; with `isLast` all that is left of the others. */
  add(token: number, held: number, isLast: boolean): string {
    let bytes = this.texts.bytesOf(token);
    if (this.isEmpty && bytes.length > 0) {
      this.isEmpty = false;
      if (this.texts.dropsFirstSpace && bytes[0] === 0x20) bytes = bytes.subarray(1);
    }
    const all = this.waiting.length > 0 ? Uint8Array.of(...this.waiting, ...bytes) : bytes;
    const certain = all.length - held;
    this.waiting = all.subarray(certain);
    return this.decoder.decode(all.subarray(0, certain), { stream: !isLast });
  }
}
