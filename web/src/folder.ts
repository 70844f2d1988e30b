/** A Hugging Face folder's model: config.json, model.safetensors or its shards, and the tokenizer's files.
 *
 * As whet.models.sources.folder: a tensor that the model does not have is an error, and so is one that it lacks. */
import type { Core } from "./core.js";
import type { DownloadOptions } from "./download.js";
import { WhetError } from "./errors.js";
import { familyOf, type Given, modelConfig, trainedPosition } from "./families.js";
import { folder as RULES } from "./facts.js";
import type { Tensor } from "./heads.js";
import type { Family, ModelConfig } from "./model.js";
import type { ModelReader } from "./parts.js";
import { findPieces, type Piece, type Stored } from "./pieces.js";
import type { Files } from "./protocol.js";
import { readSafetensors } from "./safetensors.js";
import { show } from "./sampling.js";
import type { Reader, Source } from "./sources.js";
import type { TextTokenizer } from "./tokenizer.js";

const CONFIG = "config.json";
const SINGLE = "model.safetensors";
const INDEX = "model.safetensors.index.json";
const TEXTS = ["generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"] as const;

/** The small files of a folder. */
export interface Folder {
  config: Given;
  /** Tensor -> file, of shards. */
  index: ReadonlyMap<string, string> | undefined;
  /** The files of weights, in the order of the reader's parts. */
  names: string[];
  texts: ReadonlyMap<string, string>;
}

export interface FolderReader extends ModelReader {
  folder: Folder;
}

const baseName = (name: string) => name.split("/").pop()!;

/** What the worker lends: undefined is a file that is not there. */
export interface Openers {
  open(name: string, source: Source): Promise<Reader | undefined>;
  join(readers: Reader[]): ModelReader;
}

/** `headsOnly`: the tokenizer is left out. */
export async function openFolder(files: Files, options: DownloadOptions, headsOnly: boolean, { open: openOne, join }: Openers): Promise<FolderReader> {
  const { where } = options;
  if (typeof options.sha256 === "string") throw new WhetError(`${where}: sha256 is one text, and the source is a folder. Pass an object of texts by the names of files.`);
  const given = files.length === 1 ? undefined : new Map(files.map(([name, file]) => [baseName(name), file]));
  const name = files.length === 1 ? String(files[0][1]) : "folder";
  const open = async (file: string): Promise<Reader | undefined> => {
    const source: Source | undefined = given === undefined ? new URL(file, `${name.replace(/\/$/, "")}/`).href : given.get(file);
    return source === undefined ? undefined : openOne(file, source);
  };
  const readText = async (file: string): Promise<string | undefined> => {
    const reader = await open(file);
    if (reader === undefined) return undefined;
    try {
      return new TextDecoder().decode((await reader.read(0, reader.size)).slice());
    } finally {
      await reader.close?.();
    }
  };
  const configText = await readText(CONFIG);
  if (configText === undefined) throw new WhetError(`${where}: ${name} has no ${CONFIG}. Give a Hugging Face folder, or a GGUF file.`);
  const config = parse(configText, CONFIG, where);
  familyOf(config, `${where}: ${name}`); // before weights are downloaded
  const readers: Reader[] = [];
  try {
    const single = await open(SINGLE);
    if (single !== undefined) readers.push(single);
    const index = single === undefined ? readIndex(await readText(INDEX), name, where) : undefined;
    const names = index === undefined ? [SINGLE] : [...new Set(index.values())].sort();
    for (const file of index === undefined ? [] : names) {
      const shard = await open(file);
      if (shard === undefined) throw new WhetError(`${where}: ${name} has no ${file}, which ${INDEX} names. Give all shards.`);
      readers.push(shard);
    }
    const texts = new Map<string, string>();
    for (const file of headsOnly ? [] : TEXTS) {
      const text = await readText(file);
      if (text !== undefined) texts.set(file, text);
    }
    return { ...join(readers), name, folder: { config, index, names, texts } };
  } catch (error) {
    for (const reader of readers) await reader.close?.();
    throw error;
  }
}

function parse(text: string, file: string, where: string): Record<string, any> {
  try {
    const found: unknown = JSON.parse(text);
    if (typeof found === "object" && found !== null && !Array.isArray(found)) return found;
  } catch (error) {
    throw new WhetError(`${where}: ${file} is not JSON: ${(error as Error).message}.`);
  }
  throw new WhetError(`${where}: ${file} is no JSON object.`);
}

function readIndex(text: string | undefined, name: string, where: string): ReadonlyMap<string, string> {
  if (text === undefined) throw new WhetError(`${where}: ${name} has neither ${SINGLE} nor ${INDEX}. Save the model as safetensors.`);
  const files = Object.entries(parse(text, INDEX, where).weight_map ?? {});
  const bad = files.find(([, file]) => typeof file !== "string" || !/^\w[\w.-]*\.safetensors$/.test(file));
  if (files.length === 0 || bad !== undefined) throw new WhetError(`${where}: ${INDEX} has weight_map ${show(bad)}, expected tensor names and the names of their .safetensors files.`);
  return new Map(files as [string, string][]);
}

/** Name -> tensor over all files, at their places in the whole. */
async function readTensors(core: Core, reader: FolderReader, where: string): Promise<Map<string, Tensor>> {
  const { index, names } = reader.folder;
  const found = new Map<string, Tensor>();
  for (const [i, { begin, reader: part }] of reader.parts!.entries()) {
    for (const [name, tensor] of await readSafetensors(core, part, where)) {
      if (index !== undefined && index.get(name) !== names[i]) {
        throw new WhetError(`${where}: ${names[i]} holds ${name}, which is in ${index.get(name) ?? "no file"} by ${INDEX}.`);
      }
      found.set(name, { ...tensor, offset: tensor.offset + begin });
    }
  }
  const absent = [...(index?.keys() ?? [])].find((name) => !found.has(name));
  if (absent !== undefined) throw new WhetError(`${where}: ${index!.get(absent)} does not hold ${absent}, as ${INDEX} says it does.`);
  return found;
}

const FLOATS = ["F32", "F16", "BF16", "F64"];

/** The config of a folder's model, and where its tensors go. `lengthOf`: tokens of the longest sequence, by those it was trained for. */
export async function describeFolder(core: Core, reader: FolderReader, lengthOf: (trained: number) => number, headsOnly: boolean, caller: string): Promise<{ config: ModelConfig; family: Family; pieces: Piece[] }> {
  const where = `${caller}: ${reader.name}`;
  const given = reader.folder.config;
  const family = familyOf(given, where);
  const tensors = await readTensors(core, reader, where);
  const prefix = `${family.modules.embedding.hf.split(".")[0]}.`;
  const isBare = ![...tensors.keys()].some((name) => name.startsWith(prefix)); // a checkpoint of the model without its head
  const used = new Set<string>();
  const get = (modules: string[], suffix: string): Tensor | undefined => {
    const names = modules.map((module) => `${isBare && module.startsWith(prefix) ? module.slice(prefix.length) : module}.${suffix}`);
    return names.map((name) => tensors.get(name)).find((tensor) => tensor !== undefined);
  };
  const find = (modules: string[], suffix: string): Stored => {
    const tensor = get(modules, suffix);
    if (tensor === undefined) throw new WhetError(`${where}: there is no tensor ${modules[0]}.${suffix}, which the config asks for. The folder is incomplete, or config.json is another model's.`);
    if (!FLOATS.includes(tensor.type)) throw new WhetError(`${where}: ${tensor.name} is ${tensor.type}; this engine reads ${FLOATS.join(", ")}.`);
    used.add(tensor.name);
    return { tensor, row: 0, shape: tensor.shape };
  };
  const { embedding, head } = family.modules;
  const [table, own] = [get([embedding.hf], "weight"), get([head.hf, ...(head.hf_also === undefined ? [] : [head.hf_also])], "weight")];
  let isTied: boolean | undefined;
  if (table !== undefined && own !== undefined && (given.tie_word_embeddings ?? family.defaults.tie_word_embeddings) === true) {
    isTied = headsOnly || (await areEqual(reader, table, own)); // of an estimate it is believed
    if (isTied) used.add(own.name);
  }
  const config = modelConfig(core, given, where, lengthOf(trainedPosition(given, where)), isTied);
  const pieces = findPieces(config, family, "hf", find, where);
  const buffer = new RegExp(RULES.buffers); // masks and frequencies that old checkpoints carry along
  const unknown = [...tensors.keys()].filter((name) => !used.has(name) && !buffer.test(name)).sort()[0];
  if (unknown !== undefined) throw new WhetError(`${where}: a ${given.model_type} with this config has no ${unknown}. config.json is another model's, or the engine does not know this kind.`);
  return { config, family, pieces };
}

const PIECE = 4 << 20;

async function areEqual(reader: Reader, a: Tensor, b: Tensor): Promise<boolean> {
  if (a.type !== b.type || a.shape.join() !== b.shape.join()) return false;
  for (let at = 0; at < a.sizeBytes; at += PIECE) {
    const n = Math.min(PIECE, a.sizeBytes - at);
    const [one, other] = [await reader.read(a.offset + at, n), await reader.read(b.offset + at, n)];
    if (one.some((byte, i) => byte !== other[i])) return false;
  }
  return true;
}

export const hasTemplate = ({ texts }: Folder, where: string): boolean =>
  texts.has("chat_template.jinja") || Boolean(parse(texts.get("tokenizer_config.json") ?? "{}", "tokenizer_config.json", where).chat_template);

/** Its stop tokens are EOS and those of the generation config, or of the config where there is no such. */
export function readFolderTokenizer({ config, texts }: Folder, make: typeof TextTokenizer.ofFolder, where: string): TextTokenizer {
  const json = texts.get("tokenizer.json");
  if (json === undefined) throw new WhetError(`${where}: the folder has no tokenizer.json. Give prompts as token ids.`);
  const read = (name: string) => parse(texts.get(name) ?? "{}", name, where);
  const eos: unknown = (texts.has("generation_config.json") ? read("generation_config.json") : config).eos_token_id;
  const stops = [eos].flat().filter((id) => Number.isInteger(id)) as number[];
  return make(parse(json, "tokenizer.json", where), read("tokenizer_config.json"), texts.get("chat_template.jinja"), stops, where);
}
