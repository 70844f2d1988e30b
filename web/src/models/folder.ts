/** Models in Hugging Face folders: config.json, model.safetensors or its shards, and tokenizer files.
 *
 * As in whet.models.sources.folder, an unexpected tensor is an error, and so is a missing one. */
import type { Core } from "../core/core.js";
import { show, WhetError } from "../core/errors.js";
import { folder as RULES, predicting, skippedTensors } from "../facts.js";
import type { Tensor } from "../files/headers.js";
import type { ModelReader } from "../files/parts.js";
import type { DownloadOptions, Reader } from "../files/reader.js";
import { readSafetensors } from "../files/safetensors.js";
import type { Files, Source } from "../files/sources.js";
import type { Family, ModelConfig } from "./architecture.js";
import { familyOf, hasTable, type HfConfig, modelConfig, modulesOf, textOptions, trainedContext } from "./families.js";
import { hfOrders } from "./orders.js";
import { listSlices, moduleOf, type RowSlice, type StoredTensor, unreadModules } from "./slices.js";

const CONFIG = "config.json";
const SINGLE = "model.safetensors";
const INDEX = "model.safetensors.index.json";
const TEXTS = ["generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"] as const;

/** Contents of a folder's text files. */
export interface Folder {
  config: HfConfig;
  /** Tensor -> shard; undefined for a single file. */
  index: ReadonlyMap<string, string> | undefined;
  /** Weight files, in the order of the reader's parts. */
  names: string[];
  texts: ReadonlyMap<string, string>;
}

export interface FolderReader extends ModelReader {
  folder: Folder;
}

const baseName = (name: string) => name.split("/").pop()!;

/** Functions that the worker passes in. `open` returns undefined for a missing file. `isReadInPlace`: see DownloadOptions. */
export interface Openers {
  open(name: string, source: Source, isReadInPlace: () => boolean): Promise<Reader | undefined>;
  join(readers: Reader[]): ModelReader;
}

/** Open a folder's files. `headersOnly`: without the tokenizer. */
export async function openFolder(files: Files, options: DownloadOptions, headersOnly: boolean, { open: openOne, join }: Openers): Promise<FolderReader> {
  const { where } = options;
  if (typeof options.sha256 === "string") throw new WhetError(`${where}: sha256 is a string, but the source is a folder. Pass an object {file name: digest}.`);
  const given = files.length === 1 ? undefined : new Map(files.map(([name, file]) => [baseName(name), file]));
  const name = files.length === 1 ? String(files[0][1]) : "folder";
  const open = async (file: string, isInPlace = false): Promise<Reader | undefined> => {
    const source: Source | undefined = given === undefined ? new URL(file, `${name.replace(/\/$/, "")}/`).href : given.get(file);
    return source === undefined ? undefined : openOne(file, source, () => isInPlace);
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
  if (configText === undefined) throw new WhetError(`${where}: ${name} has no ${CONFIG}. Pass a Hugging Face folder or a GGUF file.`);
  const config = parseObject(configText, CONFIG, where);
  familyOf(config, `${where}: ${name}`); // before weights are downloaded
  const isInPlace = hasTable(config, where);
  const readers: Reader[] = [];
  try {
    const single = await open(SINGLE, isInPlace);
    if (single !== undefined) readers.push(single);
    const index = single === undefined ? readIndex(await readText(INDEX), name, where) : undefined;
    const names = index === undefined ? [SINGLE] : [...new Set(index.values())].sort();
    for (const file of index === undefined ? [] : names) {
      const shard = await open(file, isInPlace);
      if (shard === undefined) throw new WhetError(`${where}: ${name} has no ${file}, which ${INDEX} lists. Pass all shards.`);
      readers.push(shard);
    }
    const texts = new Map<string, string>();
    for (const file of headersOnly ? [] : TEXTS) {
      const text = await readText(file);
      if (text !== undefined) texts.set(file, text);
    }
    return { ...join(readers), name, folder: { config, index, names, texts } };
  } catch (error) {
    for (const reader of readers) await reader.close?.();
    throw error;
  }
}

/** Parse a JSON object. */
export function parseObject(text: string, file: string, where: string): Record<string, any> {
  try {
    const found: unknown = JSON.parse(text);
    if (typeof found === "object" && found !== null && !Array.isArray(found)) return found;
  } catch (error) {
    throw new WhetError(`${where}: ${file} is not JSON: ${(error as Error).message}.`);
  }
  throw new WhetError(`${where}: ${file} is not a JSON object.`);
}

function readIndex(text: string | undefined, name: string, where: string): ReadonlyMap<string, string> {
  if (text === undefined) throw new WhetError(`${where}: ${name} has neither ${SINGLE} nor ${INDEX}. Save the model as safetensors.`);
  const files = Object.entries(parseObject(text, INDEX, where).weight_map ?? {});
  const bad = files.find(([, file]) => typeof file !== "string" || !/^\w[\w.-]*\.safetensors$/.test(file));
  if (files.length === 0 || bad !== undefined) throw new WhetError(`${where}: ${INDEX} has weight_map ${show(bad)}, expected {tensor: .safetensors file}.`);
  return new Map(files as [string, string][]);
}

/** Return the tensors of all files by name, with offsets into the concatenated files. */
async function readTensors(core: Core, reader: FolderReader, where: string): Promise<Map<string, Tensor>> {
  const { index, names } = reader.folder;
  const found = new Map<string, Tensor>();
  for (const [i, { begin, reader: part }] of reader.parts!.entries()) {
    for (const [name, tensor] of await readSafetensors(core, part, where)) {
      if (index !== undefined && index.get(name) !== names[i]) {
        throw new WhetError(`${where}: ${names[i]} contains ${name}, but ${INDEX} lists it in ${index.get(name) ?? "no file"}.`);
      }
      found.set(name, { ...tensor, offset: tensor.offset + begin });
    }
  }
  const missing = [...(index?.keys() ?? [])].find((name) => !found.has(name));
  if (missing !== undefined) throw new WhetError(`${where}: ${index!.get(missing)} lacks ${missing}, which ${INDEX} lists in it.`);
  return found;
}

const FLOATS = ["F32", "F16", "BF16", "F64"];

/** Return the config of a folder's model and the slots of its tensors. `lengthOf`: maps the trained context length to the engine's. */
export async function describeFolder(core: Core, reader: FolderReader, lengthOf: (trained: number) => number, headersOnly: boolean, caller: string): Promise<{ config: ModelConfig; family: Family; slices: RowSlice[] }> {
  const where = `${caller}: ${reader.name}`;
  const given = reader.folder.config;
  const family = familyOf(given, where);
  const stored = await readTensors(core, reader, where);
  const { file_prefix: old } = family;
  const rename = (name: string) => (old !== "" && name.startsWith(old) ? `model.${name.slice(old.length)}` : name);
  const tensors = new Map([...stored].map(([name, tensor]) => [rename(name), { ...tensor, name: rename(name) }]));
  const modules = modulesOf(given, family, tensors.keys());
  const { embedding, head } = modules;
  const prefix = `${embedding.names[0].split(".")[0]}.`;
  const isBare = ![...tensors.keys()].some((name) => name.startsWith(prefix)); // checkpoint of the base model without its head
  const used = new Set<string>();
  const lookUp = (modules: readonly string[], suffix: string): Tensor | undefined => {
    const names = modules.map((module) => `${isBare && module.startsWith(prefix) ? module.slice(prefix.length) : module}.${suffix}`);
    return names.map((name) => tensors.get(name)).find((tensor) => tensor !== undefined);
  };
  const find = (modules: readonly string[], suffix: string): StoredTensor => {
    const tensor = lookUp(modules, suffix);
    if (tensor === undefined) throw new WhetError(`${where}: tensor ${modules[0]}.${suffix} is missing. The folder is incomplete, or config.json belongs to another model.`);
    if (!FLOATS.includes(tensor.type)) throw new WhetError(`${where}: ${tensor.name} is ${tensor.type}, expected ${FLOATS.join(", ")}.`);
    used.add(tensor.name);
    return { tensor, row: 0, shape: tensor.shape };
  };
  const [table, own] = [lookUp(embedding.names, "weight"), lookUp(head.names, "weight")];
  let isTied: boolean | undefined;
  if (table !== undefined && own !== undefined && (textOptions(given).tie_word_embeddings ?? family.defaults.tie_word_embeddings) === true) {
    isTied = headersOnly || (await areEqual(reader, table, own)); // an estimate trusts tie_word_embeddings
    if (isTied) used.add(own.name);
  }
  const config = modelConfig(core, given, where, lengthOf(trainedContext(given, where)), isTied);
  const slices = listSlices(config, modules, find, where, hfOrders);
  const buffer = new RegExp(RULES.buffers); // masks and frequencies in old checkpoints
  const skipped = new RegExp(`^${skippedTensors}$`); // towers of a vision-language model
  const hasTowers = textOptions(given) !== given;
  const isSkipped = (name: string) => buffer.test(name) || (skipped.test(name) && (hasTowers || name.startsWith(predicting)));
  const unread = unreadModules(config, modules);
  const unknown = [...tensors.keys()].filter((name) => !used.has(name) && !isSkipped(name) && !unread.has(moduleOf(name))).sort()[0];
  if (unknown !== undefined) throw new WhetError(`${where}: unexpected tensor ${unknown} for this ${given.model_type}. config.json belongs to another model, or the variant is not supported.`);
  return { config, family, slices };
}

const CHUNK_BYTES = 4 << 20;

/** Whether two tensors have the same bytes. */
async function areEqual(reader: Reader, a: Tensor, b: Tensor): Promise<boolean> {
  if (a.type !== b.type || a.shape.join() !== b.shape.join()) return false;
  for (let at = 0; at < a.sizeBytes; at += CHUNK_BYTES) {
    const n = Math.min(CHUNK_BYTES, a.sizeBytes - at);
    const [one, other] = [await reader.read(a.offset + at, n), await reader.read(b.offset + at, n)];
    if (one.some((byte, i) => byte !== other[i])) return false;
  }
  return true;
}

export const hasTemplate = ({ texts }: Folder, where: string): boolean =>
  texts.has("chat_template.jinja") || Boolean(parseObject(texts.get("tokenizer_config.json") ?? "{}", "tokenizer_config.json", where).chat_template);

/** Return the parsed tokenizer files of a folder. `stopIds`: eos_token_id of generation_config.json, else of config.json. */
export function readTokenizerFiles({ config, texts }: Folder, where: string) {
  const json = texts.get("tokenizer.json");
  if (json === undefined) throw new WhetError(`${where}: the folder has no tokenizer.json. Pass prompts as token ids.`);
  const read = (name: string) => parseObject(texts.get(name) ?? "{}", name, where);
  const eos: unknown = (texts.has("generation_config.json") ? read("generation_config.json") : { ...textOptions(config), ...config }).eos_token_id;
  const stopIds = [eos].flat().filter((id) => Number.isInteger(id)) as number[];
  return { json: parseObject(json, "tokenizer.json", where), config: read("tokenizer_config.json"), template: texts.get("chat_template.jinja"), stopIds };
}
