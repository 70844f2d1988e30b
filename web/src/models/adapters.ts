/** PEFT LoRA adapters: adapter_config.json and adapter_model.safetensors, mapped to rows of the engine's matrices. */
import type { Core } from "../core/core.js";
import { show, WhetError } from "../core/errors.js";
import { adapters as RULES, enums } from "../facts.js";
import type { Reader } from "../files/reader.js";
import { readFloats, readSafetensors } from "../files/safetensors.js";
import type { Files } from "../files/sources.js";
import { type Family, type ModelConfig, moduleRows, slots } from "./architecture.js";
import { HF_MODULES } from "./families.js";
import { parseObject } from "./folder.js";
import { hfOrders, moveColumns } from "./orders.js";
import { eachModule, type OrderName, storedModules } from "./slices.js";

/** Factors of one weight: W[firstRow ...] += scaling b a, with a (rank, k) and b (n, rank). */
export interface LoraFactors {
  /** Name in the Hugging Face model. */
  module: string;
  layer: number;
  target: (typeof enums.target)[number];
  firstRow: number;
  rank: number;
  a: Float32Array;
  b: Float32Array;
  scaling: number;
}

const [CONFIG, WEIGHTS] = ["adapter_config.json", "adapter_model.safetensors"];

/** Return names and URLs of an adapter's files in a folder, given by its URL. */
export const adapterFiles = (folder: string): Files => [CONFIG, WEIGHTS].map((name) => [name, new URL(name, `${folder.replace(/\/$/, "")}/`).href]);

export interface ModuleLocation {
  /** Names in the Hugging Face model, of which adapters have the first. */
  names: string[];
  slot: string;
  layer: number;
  target: LoraFactors["target"] | undefined;
  /** Whether a learner has an adapter of it by default. */
  isAdapted: boolean;
  firstRow: number;
  shape: [n: number, k: number];
  /** Orders of the module's rows and columns. */
  order: OrderName;
  columnOrder: OrderName;
}

/** Map each linear module of the Hugging Face model to its rows of a slot, in the order of Python's learner. */
export function locateModules(config: ModelConfig, family: Family): Map<string, ModuleLocation> {
  const found = new Map<string, ModuleLocation>();
  const shapes = slots(config);
  for (const { module, slot, part, layer, names } of eachModule(config, storedModules(HF_MODULES[family.name], []))) {
    const shape = shapes.get(slot);
    if (shape === undefined || shape.length !== 2 || module.parameter !== undefined || slot.endsWith("router")) continue;
    const [firstRow, n] = moduleRows(config, layer, part, shape[0]);
    if (n === 0) continue;
    const matrix = slot === "layer_inputs" ? slot : /^layers\.\d+\.(\w+)$/.exec(slot)?.[1].replace("gate_up", "up").replace(/^\w+_in$/, "qkv").replace(/^(conv|delta)_out$/, "o");
    const target = matrix as LoraFactors["target"] | undefined;
    found.set(names[0], { names, slot, layer, target, isAdapted: module.isAdapted ?? true, firstRow, shape: [n, shape[1]], order: module.order ?? "keepOrder", columnOrder: module.columnOrder ?? "keepOrder" });
  }
  return found;
}

/** Read an adapter's factors, checked against the model's shapes. */
export async function readAdapter(core: Core, readers: Reader[], config: ModelConfig, family: Family, where: string): Promise<LoraFactors[]> {
  const find = (name: string): Reader => {
    const found = readers.find((reader) => reader.name.split("/").pop() === name);
    if (found === undefined) {
      throw new WhetError(`${where}: source has ${readers.map((reader) => reader.name).join(", ")} but not ${name}. Pass both files that PEFT saves: ${CONFIG} and ${WEIGHTS}.`);
    }
    return found;
  };
  const [configFile, weights] = [find(CONFIG), find(WEIGHTS)];
  const settings = parseConfig(new TextDecoder().decode((await configFile.read(0, configFile.size)).slice()), where);
  const entries = await readSafetensors(core, weights, where);
  const locations = locateModules(config, family);
  const pairs = new Map<string, { A?: string; B?: string }>();
  for (const [name, { shape }] of entries) {
    const match = /^(.+)\.lora_([AB])\.weight$/.exec(name.startsWith(RULES.prefix) ? name.slice(RULES.prefix.length) : "");
    if (match === null || shape.length !== 2) throw new WhetError(`${where}: ${name} (${shape.join(", ")}) is not a LoRA factor of a linear layer. Merge the adapter: whet merge.`);
    pairs.set(match[1], { ...pairs.get(match[1]), [match[2]]: name });
  }
  if (pairs.size === 0) throw new WhetError(`${where}: ${weights.name} has neither lora_A nor lora_B.`);
  const factors: LoraFactors[] = [];
  for (const [module, { A, B }] of pairs) {
    const [a, b] = [entries.get(A ?? ""), entries.get(B ?? "")];
    const location = locations.get(module);
    if (location === undefined) throw new WhetError(`${where}: this model has no module ${module}. Load the adapter on its base model.`);
    if (location.target === undefined) throw new WhetError(`${where}: adapters of ${module} are not supported. Merge the adapter with whet merge and load the result.`);
    const [n, k] = location.shape;
    if (a === undefined || b === undefined || a.shape[0] < 1 || a.shape[0] !== b.shape[1] || a.shape[1] !== k || b.shape[0] !== n) {
      throw new WhetError(`${where}: ${module} has A (${a?.shape.join(", ") ?? "none"}) and B (${b?.shape.join(", ") ?? "none"}), expected (r, ${k}) and (${n}, r). Load the adapter on its base model.`);
    }
    const rank = a.shape[0];
    const scaling = alphaOf(settings, module, where) / (settings.use_rslora ? Math.sqrt(rank) : rank);
    const [down, up] = [await readFloats(weights, a, where), await readFloats(weights, b, where)];
    if (!down.every(Number.isFinite) || !up.every((x) => Number.isFinite(Math.fround(Math.fround(scaling) * x)))) throw new WhetError(`${where}: the adapter of ${module} contains NaN or infinity. Check the training run.`);
    const rows = new Float32Array(up.length);
    for (const [to, from, count] of hfOrders[location.order](config, n)) rows.set(up.subarray(from * rank, (from + count) * rank), to * rank);
    factors.push({ module, layer: location.layer, target: location.target, firstRow: location.firstRow, rank, a: moveColumns(down, k, hfOrders[location.columnOrder](config, k)), b: rows, scaling });
  }
  return factors;
}

function parseConfig(text: string, where: string): Record<string, any> {
  const config = parseObject(text, CONFIG, where);
  if (config.peft_type !== "LORA") throw new WhetError(`${where}: peft_type is ${show(config.peft_type)}, expected "LORA".`);
  for (const [key, neutral] of Object.entries(RULES.plain)) {
    const value = config[key];
    const isNeutral = value === undefined || value === null || value === false || value === neutral || (Array.isArray(value) && value.length === 0);
    if (!isNeutral) throw new WhetError(`${where}: ${key} is ${show(value)}; only plain LoRA is supported. Merge the adapter: whet merge.`);
  }
  if ((config.bias ?? "none") !== "none") throw new WhetError(`${where}: bias is ${show(config.bias)}, expected "none": trained biases are not LoRA.`);
  const init: unknown = config.init_lora_weights;
  if (typeof init === "string" && RULES.changesBase.some((name) => init.toLowerCase().startsWith(name))) {
    throw new WhetError(`${where}: init_lora_weights is ${show(init)}, which modifies the base weights. Convert it with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...).`);
  }
  return config;
}

/** Return alpha: the first alpha_pattern entry whose regular expression matches the module or its suffix (PEFT's rule), else lora_alpha. */
function alphaOf(config: Record<string, any>, module: string, where: string): number {
  let alpha: unknown = config.lora_alpha ?? 8;
  for (const [name, value] of Object.entries(config.alpha_pattern ?? {})) {
    if (!new RegExp(`^(.*\\.)?(${name})$`).test(module)) continue;
    alpha = value;
    break;
  }
  if (typeof alpha !== "number" || !Number.isFinite(alpha)) throw new WhetError(`${where}: alpha of ${module} is ${show(alpha)}, expected a finite number.`);
  return alpha;
}
