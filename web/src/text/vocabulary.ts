/** Translation of a GGUF file's tokenizer.ggml.* keys into a tokenizer.json, by the rules and tables of whet.models.tokenizers. */
import { WhetError } from "../core/errors.js";
import { preTokenizers, vocabulary as RULES } from "../facts.js";

export type Metadata = ReadonlyMap<string, unknown>;
/** Contents of a tokenizer.json. */
export type TokenizerJson = Record<string, any>;

interface Kind {
  specialIds: Record<string, number>;
  addBos: boolean;
  addEos: boolean;
  addSpacePrefix: boolean;
}

interface PreTokenizer {
  patterns: readonly string[];
  ignoreMerges: boolean;
  addBos: boolean;
  byteLevel: boolean;
}

export interface AddedToken {
  id: number;
  content: string;
  special: boolean;
}

export interface Vocabulary {
  /** Texts of tokens by id. */
  texts: string[];
  added: AddedToken[];
  /** Decoder in the form of tokenizer.json. */
  decoder: TokenizerJson;
  /** Build the whole tokenizer.json. Its merges take tens of megabytes, so it is built only to encode texts. */
  json(): TokenizerJson;
  /** Ids by GGUF role: bos, eos, unknown and so on. */
  roles: Map<string, number>;
  /** Ids of tokens that end a completion, ascending. */
  stopIds: number[];
}

const TYPE = RULES.types;
const SPACE = "\u2581";

const PRE_TOKENIZERS = new Map((preTokenizers as readonly (readonly [readonly string[], PreTokenizer])[]).flatMap(([names, meaning]) => names.map((name) => [name, meaning])));

/** Read the tokenizer from a file's metadata. */
export function readVocabulary(metadata: Metadata, where: string): Vocabulary {
  return new VocabularyReader(metadata, where).read();
}

class VocabularyReader {
  constructor(
    private readonly metadata: Metadata,
    private readonly where: string,
  ) {}

  private invalid(name: string, found: unknown, expected: string): WhetError {
    const value = String(JSON.stringify(found) ?? "missing").slice(0, 80);
    return new WhetError(`${this.where}: tokenizer.ggml.${name} is ${value}, expected ${expected}. Convert the model again, or pass prompts as token ids.`);
  }

  private readValue<T>(name: string, kind: "string" | "number" | "boolean", expected: string, fallback: T): T {
    const value = this.metadata.get(`tokenizer.ggml.${name}`);
    if (value === undefined) return fallback;
    if (typeof value !== kind) throw this.invalid(name, value, expected);
    return value as T;
  }

  private readArray<T>(name: string, kind: "string" | "number", n?: number): T[] {
    const items = this.metadata.get(`tokenizer.ggml.${name}`) ?? [];
    if (!Array.isArray(items)) throw this.invalid(name, items, `an array of ${kind}s`);
    if (items.length > 0 && n !== undefined && items.length !== n) throw this.invalid(name, `${items.length} items`, `one for each of the ${n} tokens`);
    const bad = items.find((item) => typeof item !== kind);
    if (bad !== undefined) throw this.invalid(name, bad, `an array of ${kind}s`);
    return items as T[];
  }

  read(): Vocabulary {
    const model = this.readValue<string>("model", "string", "a text", "missing");
    const kind = (RULES.kinds as Record<string, Kind>)[model];
    if (kind === undefined || model === "t5" || this.readArray("precompiled_charsmap", "number").length > 0) {
      const refused = (RULES.refused as Record<string, string>)[model];
      const reason = kind !== undefined ? "has a compiled normalisation" : refused !== undefined ? `is ${refused}` : "is unknown";
      throw new WhetError(
        `${this.where}: tokenizer.ggml.model is "${model}", which ${reason}; supported: gpt2, gemma4 and llama without compiled normalisation. Pass prompts as token ids.`,
      );
    }
    const { tokens, index } = this.tokens();
    const types = this.types(tokens.length);
    const pre = model === "llama" ? undefined : this.preTokenizer(model);
    const ids = this.specialIds(kind, tokens.length);
    const stopIds = markSpecial(index, types, ids);
    const addBos = this.readValue("add_bos_token", "boolean", "a bool", kind.addBos || (pre?.addBos ?? false));
    const addEos = this.readValue("add_eos_token", "boolean", "a bool", kind.addEos);
    for (const [role, isNeeded] of [["bos", addBos], ["eos", addEos]] as const) {
      if (isNeeded && !ids.has(role)) throw this.invalid(`${role}_token_id`, undefined, "an id: this tokenizer adds the token");
    }
    for (const [role, isControl] of [["bos", addBos], ["eos", true], ["unknown", model === "llama"]] as const) {
      const id = ids.get(role);
      if (isControl && id !== undefined && !isSpecial(types[id])) types[id] = TYPE.CONTROL;
    }
    const roles = new Map([...ids].filter(([role, id]) => (RULES.roles as readonly string[]).includes(role) && isSpecial(types[id])));
    const addsSpace = model === "llama" && this.readValue("add_space_prefix", "boolean", "a bool", kind.addSpacePrefix);
    const decoder = pre?.byteLevel ? { type: "ByteLevel" } : decoderOf(addsSpace);
    const stripped = this.findRightStripped(tokens, types);
    const added = tokens.flatMap((content, id) =>
      isSpecial(types[id])
        ? [{ id, content, special: types[id] !== TYPE.USER_DEFINED, single_word: false, lstrip: false, rstrip: stripped.has(id), normalized: false }]
        : [],
    );
    const token = (role: string) => ({ SpecialToken: { id: tokens[ids.get(role)!], type_id: 0 } });
    const template = [...(addBos ? [token("bos")] : []), { Sequence: { id: "A", type_id: 0 } }, ...(addEos ? [token("eos")] : [])];
    const post_processor = { type: "TemplateProcessing", single: template, pair: template };
    const json = () => ({
      ...(pre === undefined ? this.buildPieces(tokens, types, roles, addsSpace) : this.buildBytePairs(tokens, pre)),
      decoder,
      added_tokens: added,
      post_processor,
    });
    return { texts: tokens, added, decoder, json, roles, stopIds };
  }

  private tokens(): { tokens: string[]; index: Map<string, number> } {
    const tokens = this.readArray<string>("tokens", "string").map((token, i) => token || `[EMPTY_${i}]`);
    if (tokens.length < 1 || tokens.length > RULES.mostTokens) throw this.invalid("tokens", `${tokens.length} items`, `1 to ${RULES.mostTokens} tokens`);
    const index = new Map<string, number>();
    for (const [i, token] of tokens.entries()) {
      if (index.has(token)) throw this.invalid("tokens", token, "each token once");
      index.set(token, i);
    }
    return { tokens, index };
  }

  private types(n: number): number[] {
    const types = this.readArray<number>("token_type", "number", n).map((type) => type || TYPE.UNUSED);
    const bad = types.find((type) => !Object.values(TYPE).includes(type as never));
    if (bad !== undefined) throw this.invalid("token_type", bad, "0 to 6");
    return types.length > 0 ? types : Array<number>(n).fill(TYPE.NORMAL);
  }

  private preTokenizer(model: string): PreTokenizer {
    const name = model === "gemma4" ? model : this.readValue("pre", "string", "a text", "default");
    const found = PRE_TOKENIZERS.get(name);
    if (found === undefined) throw this.invalid("pre", name, `a known pre-tokenizer, such as ${[...PRE_TOKENIZERS.keys()].slice(0, 4).join(", ")}`);
    return found;
  }

  private specialIds(kind: Kind, n: number): Map<string, number> {
    const ids = new Map(Object.entries(kind.specialIds).filter(([, id]) => id < n));
    for (const role of [...RULES.roles, ...Object.keys(RULES.fillInTheMiddle)]) {
      const found = this.readValue<number | undefined>(`${role}_token_id`, "number", "an id", undefined);
      if (found === undefined) continue;
      if (!Number.isInteger(found) || found < 0 || found >= n) throw this.invalid(`${role}_token_id`, found, `one of the ${n} tokens`);
      ids.set(role, found);
    }
    return ids;
  }

  private buildBytePairs(tokens: string[], pre: PreTokenizer): TokenizerJson {
    if (!this.metadata.has("tokenizer.ggml.merges")) throw this.invalid("merges", undefined, "an array of texts");
    const known = new Set(tokens);
    const merges = [...new Set(this.readArray<string>("merges", "string"))].map((merge) => {
      const space = merge.indexOf(" ", 1);
      const [left, right] = [merge.slice(0, space), merge.slice(space + 1)];
      if (space < 0 || !known.has(left) || !known.has(right) || !known.has(left + right)) {
        throw this.invalid("merges", merge, "two tokens, separated by a space, whose concatenation is a token");
      }
      return [left, right];
    });
    const splits: object[] = pre.patterns.map((pattern) => ({ type: "Split", pattern: { Regex: pattern }, behavior: "Isolated", invert: false }));
    const model = { type: "BPE", vocab: vocabOf(tokens), merges, ignore_merges: pre.ignoreMerges, byte_fallback: !pre.byteLevel };
    if (pre.byteLevel) {
      splits.push({ type: "ByteLevel", add_prefix_space: false, trim_offsets: true, use_regex: false });
      return { model, normalizer: null, pre_tokenizer: { type: "Sequence", pretokenizers: splits } };
    }
    return { model, normalizer: replace(" ", SPACE), pre_tokenizer: { type: "Sequence", pretokenizers: splits } };
  }

  private buildPieces(tokens: string[], types: number[], roles: Map<string, number>, addsSpace: boolean): TokenizerJson {
    const scores = this.readArray<number>("scores", "number", tokens.length);
    if (scores.length === 0) throw this.invalid("scores", undefined, `an array of ${tokens.length} numbers`);
    const bad = scores.find((score) => !Number.isFinite(score));
    if (bad !== undefined) throw this.invalid("scores", String(bad), "finite numbers");
    const unknown = roles.get("unknown");
    const bytes = new Set(tokens.filter((_, i) => types[i] === TYPE.BYTE));
    const hasBytes = Array.from({ length: 256 }, (_, i) => `<0x${i.toString(16).toUpperCase().padStart(2, "0")}>`).every((token) => bytes.has(token));
    const steps: object[] = [];
    if (this.readValue("remove_extra_whitespaces", "boolean", "a bool", false)) {
      steps.push({ type: "Replace", pattern: { Regex: "^ +| +$" }, content: "" }, { type: "Replace", pattern: { Regex: " {2,}" }, content: " " });
    }
    if (addsSpace) steps.push({ type: "Prepend", prepend: " " });
    return {
      model: {
        type: "BPE",
        vocab: vocabOf(tokens),
        merges: mergesOfScores(tokens, types, scores),
        unk_token: unknown === undefined ? null : tokens[unknown],
        fuse_unk: true,
        byte_fallback: hasBytes,
      },
      normalizer: { type: "Sequence", normalizers: [...steps, replace(" ", SPACE)] },
      pre_tokenizer: null,
    };
  }

  /** Return the ids of special tokens that strip whitespace on their right: Phi-3's, which GGUF cannot express. */
  private findRightStripped(tokens: string[], types: number[]): Set<number> {
    const name = this.metadata.get("general.name");
    if (typeof name !== "string" || !/phi-?3/i.test(name)) return new Set();
    return new Set(types.flatMap((type, i) => (isSpecial(type) && !["<unk>", "<s>", "<|endoftext|>"].includes(tokens[i]) ? [i] : [])));
  }
}

const isSpecial = (type: number) => (RULES.special as readonly number[]).includes(type);
const replace = (from: string, to: string) => ({ type: "Replace", pattern: { String: from }, content: to });
const decoderOf = (addsSpace: boolean) => ({
  type: "Sequence",
  decoders: [replace(SPACE, " "), { type: "ByteFallback" }, { type: "Fuse" }, ...(addsSpace ? [{ type: "Strip", content: " ", start: 1, stop: 0 }] : [])],
});
const vocabOf = (tokens: string[]) => Object.fromEntries(tokens.map((token, i) => [token, i]));

/** Return all pairs of pieces whose concatenation is a piece, by descending score. */
function mergesOfScores(tokens: string[], types: number[], scores: number[]): string[][] {
  const mergeable = types.flatMap((type, i) => (type === TYPE.NORMAL || type === TYPE.USER_DEFINED || type === TYPE.UNUSED ? [i] : []));
  const pieces = new Set(mergeable.map((i) => tokens[i]));
  const merges: string[][] = [];
  for (const i of mergeable.sort((a, b) => scores[b] - scores[a] || a - b)) {
    const characters = [...tokens[i]];
    for (let k = 1; k < characters.length; ++k) {
      const pair = [characters.slice(0, k).join(""), characters.slice(k).join("")];
      if (pieces.has(pair[0]) && pieces.has(pair[1])) merges.push(pair);
    }
  }
  return merges;
}

/** Set token types and roles by the texts of known special tokens. Return the ids of tokens that end a completion. */
function markSpecial(index: Map<string, number>, types: number[], ids: Map<string, number>): number[] {
  for (const [role, texts] of Object.entries(RULES.fillInTheMiddle)) {
    const text = texts.find((each) => index.has(each));
    if (ids.has(role) || text === undefined) continue;
    ids.set(role, index.get(text)!);
    types[index.get(text)!] = TYPE.CONTROL;
  }
  const ends = RULES.ends.filter((text) => index.has(text));
  for (const text of ends) types[index.get(text)!] = TYPE.CONTROL;
  for (const text of RULES.alwaysShown) if (index.has(text)) types[index.get(text)!] = TYPE.USER_DEFINED;
  const stops = new Set(ends.map((text) => index.get(text)!));
  for (const role of RULES.endsGeneration) if (ids.has(role)) stops.add(ids.get(role)!);
  const has = (text: string) => (ends as string[]).includes(text);
  if ((has("<|return|>") || has("<|flush|>")) && (has("<|call|>") || has("<|calls|>")) && has("<|end|>")) {
    stops.delete(index.get("<|end|>")!); // ends a message there, not the completion
    types[index.get("<|end|>")!] = TYPE.USER_DEFINED;
  }
  if (has("</s>") && (has("<|tool_response>") || stops.has(index.get("<|plamo:eos|>") ?? -1))) {
    stops.delete(index.get("</s>")!); // HTML there
    types[index.get("</s>")!] = TYPE.NORMAL;
  }
  return [...stops].sort((a, b) => a - b);
}
