/** Tokenization, detokenization and chat templates. */
import { Template } from "@huggingface/jinja";
import { Tokenizer } from "@huggingface/tokenizers";
import { WhetError } from "../core/errors.js";
import { TextStream, TokenTexts } from "./token_texts.js";
import { type Metadata, readVocabulary, type TokenizerJson } from "./vocabulary.js";

interface PlainMessage {
  role: string;
  /** Text, or parts that the chat template supports; optional with tool calls. */
  content?: string | readonly unknown[] | null;
  /** Tool calls of the assistant, for the chat template. */
  tool_calls?: readonly unknown[];
}

/** Message for the chat template, which may use further keys. (A union, since interfaces lack index signatures.) */
export type Message = PlainMessage | (PlainMessage & { [key: string]: unknown });

export interface PromptOptions {
  /** JSON schemas of tools, for the chat template. */
  tools?: unknown[];
  /** End the prompt with the start of the assistant's turn. Default: true. */
  addGenerationPrompt?: boolean;
  /** Further variables of the chat template, such as enable_thinking. */
  templateOptions?: Record<string, unknown>;
}

/** Names of special tokens in transformers and in GGUF. */
const ROLES = { bos_token: "bos", eos_token: "eos", unk_token: "unknown", pad_token: "padding", sep_token: "seperator", mask_token: "mask", cls_token: "cls" };
const TEMPLATE = "tokenizer.chat_template";

/** Contents of tokenizer.json, tokenizer_config.json and chat_template.jinja. */
interface FolderTokenizer {
  json: TokenizerJson;
  config: Record<string, any>;
  template: string | undefined;
  stopIds: number[];
}

interface TokenizerData {
  json(): TokenizerJson;
  /** Texts of special tokens by transformers name. */
  specialTokens: Record<string, string>;
  /** Template sources by name; "default" is the default template. */
  templates: Map<string, string>;
}

export class TextTokenizer {
  private backend: Tokenizer | undefined;
  private readonly compiled = new Map<string, Template>();

  private constructor(
    private readonly data: TokenizerData,
    readonly texts: TokenTexts,
    readonly stopIds: number[],
    private readonly where: string,
  ) {}

  /** Built on the first encoding: decoding does not need it. */
  private get encoder(): Tokenizer {
    try {
      return (this.backend ??= new Tokenizer(this.data.json(), {}));
    } catch (error) {
      throw new WhetError(`${this.where}: the tokenizer cannot be built: ${String((error as Error)?.message ?? error)}. Pass prompts as token ids.`);
    }
  }

  /** Build a tokenizer from a GGUF file's metadata. */
  static fromGguf(metadata: Metadata, where: string): TextTokenizer {
    const { texts: tokens, added, decoder, json, roles, stopIds } = readVocabulary(metadata, where);
    const specialTokens = Object.fromEntries(
      Object.entries(ROLES).flatMap(([name, role]) => (roles.has(role) ? [[name, tokens[roles.get(role)!]]] : [])),
    );
    const templates = new Map<string, string>();
    for (const [key, value] of metadata) {
      if (key !== TEMPLATE && !key.startsWith(`${TEMPLATE}.`)) continue;
      if (typeof value !== "string") throw new WhetError(`${where}: ${key} is ${JSON.stringify(value)?.slice(0, 60)}, expected a string. Remove the key.`);
      templates.set(key === TEMPLATE ? "default" : key.slice(TEMPLATE.length + 1), value);
    }
    const texts = new TokenTexts(decoder, tokens, added, where);
    return new TextTokenizer({ json, specialTokens, templates }, texts, stopIds, where);
  }

  /** Build a tokenizer from a folder's files. EOS is added to `stopIds`. */
  static fromFolder({ json, config, template, stopIds }: FolderTokenizer, where: string): TextTokenizer {
    const specialTokens: Record<string, string> = {};
    for (const name of Object.keys(ROLES)) {
      const text = config[name]?.content ?? config[name];
      if (typeof text === "string") specialTokens[name] = text;
    }
    const given: unknown = template ?? config.chat_template;
    const templates = new Map<string, string>(
      typeof given === "string" ? [["default", given]] : Array.isArray(given) ? given.map((each) => [String(each.name), String(each.template)]) : [],
    );
    const { vocab } = json.model;
    const tokens: string[] = Array.isArray(vocab) ? vocab.map(([text]: [string]) => text) : [];
    if (!Array.isArray(vocab)) for (const [text, id] of Object.entries(vocab)) tokens[id as number] = text;
    const texts = new TokenTexts(json.decoder, tokens, json.added_tokens ?? [], where);
    const stops = new Set([...stopIds, ...texts.findSpecial([specialTokens.eos_token ?? ""])]);
    return new TextTokenizer({ json: () => json, specialTokens, templates }, texts, [...stops], where);
  }

  /** Encode a text; special tokens in it are recognised. `addSpecialTokens`: add BOS and EOS as the model specifies. */
  encode(text: string, addSpecialTokens = true): number[] {
    return this.encoder.encode(text, { add_special_tokens: addSpecialTokens }).ids;
  }

  /** EOS, which ends a text; undefined if the model has none. */
  get eosId(): number | undefined {
    return this.texts.findSpecial([this.data.specialTokens.eos_token ?? ""])[0];
  }

  stream(): TextStream {
    return new TextStream(this.texts);
  }

  /** Decode token ids, without special tokens. */
  decode(ids: Iterable<number>): string {
    const stream = this.stream();
    let text = "";
    for (const id of ids) text += stream.add(id, 0, false);
    return text + stream.add(-1, 0, true);
  }

  /** Render messages with the model's chat template. */
  render(messages: Message[], { tools, addGenerationPrompt = true, templateOptions = {} }: PromptOptions, where: string): string {
    const { templates, specialTokens } = this.data;
    const name = tools !== undefined && templates.has("tool_use") ? "tool_use" : "default";
    const source = templates.get(name);
    if (source === undefined) throw new WhetError(`${where}: the model has no chat template. Pass the prompt as a text or as token ids.`);
    try {
      let template = this.compiled.get(source);
      if (template === undefined) this.compiled.set(source, (template = new Template(source)));
      return template.render({ ...specialTokens, ...templateOptions, messages, tools: tools ?? null, documents: templateOptions.documents ?? null, add_generation_prompt: addGenerationPrompt });
    } catch (error) {
      throw new WhetError(`${where}: the chat template cannot render these messages (${String((error as Error)?.message ?? error)}). Change the messages, or pass the prompt as a text.`);
    }
  }
}
