/** Models in GGUF files: metadata becomes a ModelConfig, and tensors are mapped to slots.
 *
 * As in whet.models.sources.gguf, an unknown option or tensor is an error, since it may change the computation. */
import type { Core } from "../core/core.js";
import { show, WhetError } from "../core/errors.js";
import { activations, gguf as NAMES, ggufFamilies } from "../facts.js";
import type { GgufFile, Value } from "../files/gguf.js";
import type { Tensor } from "../files/headers.js";
import type { Reader } from "../files/reader.js";
import { allButEvery, FAMILIES, type Family, type ModelConfig, merge, PLAIN, settingsOf, withExperts } from "./architecture.js";
import { ropeFrequencies } from "./rope.js";
import { listSlices, moduleOf, type ModuleSpec, type RowSlice, type StoredTensor, unreadModules, type WeightLocation } from "./slices.js";

const KEYS: Record<string, string> = NAMES.keys;
/** Architectures and tensors of GGUF models, by family. */
const GGUF: Record<string, { architecture: string; hybrid?: string; mixture?: string; scaled?: boolean; scale_by_hidden?: number; sliding_window?: number; normalised?: boolean; ignored?: readonly string[]; modules: Record<string, ModuleSpec> }> = merge(ggufFamilies);

const LOCAL_SIZES = ["local_head_dim", "local_value_dim", "local_rotary_dim"];

/** Whether a file, by its first bytes, is of a family with a second embedding. Its first key is general.architecture. */
export function hasTable(head: Uint8Array): boolean {
  const found = /^GGUF.{20}\x14\0{7}general\.architecture\x08\0{3}(.)\0{7}(.*)/s.exec(String.fromCharCode(...head.subarray(0, 128)));
  const name = found?.[2].slice(0, found[1].charCodeAt(0));
  return Object.values(FAMILIES).some((family) => "layer_input_dim" in family.keys && GGUF[family.name]?.architecture === name);
}

/** Checked access to the options of a model's architecture. */
class GgufOptions {
  private readonly given: Record<string, Value> = {};
  readonly architecture: string;

  constructor(
    file: GgufFile,
    private readonly where: string,
  ) {
    const architecture = file.metadata.get("general.architecture");
    const known = new Set(Object.values(GGUF).flatMap(({ architecture, hybrid, mixture }) => [architecture, hybrid, mixture].filter((name) => name !== undefined)));
    if (typeof architecture !== "string" || !known.has(architecture)) {
      throw new WhetError(`${where}: general.architecture is ${show(architecture)}; supported: ${[...known].join(", ")}.`);
    }
    this.architecture = architecture;
    const prefix = `${architecture}.`;
    for (const [key, value] of file.metadata) {
      if (!key.startsWith(prefix)) continue;
      const option = key.slice(prefix.length);
      const names = Object.keys(KEYS).filter((name) => KEYS[name] === option);
      const neutral = (NAMES.plain as Record<string, readonly unknown[]>)[option];
      if (names.length === 0 && neutral === undefined && !(NAMES.ignored_keys as readonly string[]).includes(option)) {
        throw new WhetError(`${where}: option ${key} is not supported.`);
      }
      if (neutral !== undefined && !neutral.includes(value)) {
        throw new WhetError(`${where}: ${key} is ${show(value)}, expected ${show(neutral[0])} or none.`);
      }
      for (const name of names) this.given[name] = value;
    }
  }

  get(name: string): Value | undefined {
    return this.given[name];
  }

  drop(name: string): void {
    delete this.given[name];
  }

  invalid(name: string, expected: string): WhetError {
    return new WhetError(`${this.where}: ${this.architecture}.${KEYS[name]} is ${show(this.given[name])}, expected ${expected}.`);
  }

  size(name: string, fallback?: number): number {
    let value: Value | undefined = this.given[name] ?? fallback;
    if (Array.isArray(value) && value.length > 0 && value.every((each) => each === (value as Value[])[0])) value = value[0];
    if (typeof value !== "number" || !Number.isInteger(value) || value < 1 || value >= 2 ** 31) {
      throw this.invalid(name, "an integer of at least 1");
    }
    return value;
  }

  number(name: string, fallback = 0): number {
    const value = this.given[name] ?? fallback;
    if (typeof value !== "number" || !(value > 0 && value < Infinity)) throw this.invalid(name, "a finite number above 0");
    return value;
  }

  /** Return one flag for each of n layers, and perhaps for blocks after them. */
  flags(name: string, n: number, nBlocks = n): boolean[] {
    const value = this.given[name];
    if (!Array.isArray(value) || (value.length !== n && value.length !== nBlocks)) throw this.invalid(name, `${n} of true and false`);
    return value.slice(0, n).map(Boolean);
  }

  /** Return the fields of layers of different sizes, shared keys and values, and inputs by token. Several widths become the first. */
  layerSizes(family: Family): Partial<ModelConfig> {
    const isOther = (name: string, value: unknown) => (this.given[name] ?? value) !== value;
    const counts = ["n_shared_kv_layers", "layer_input_dim"];
    if (!("local_head_dim" in family.keys)) {
      for (const name of LOCAL_SIZES) if (isOther(name, this.given.head_dim)) throw this.invalid(name, `${KEYS.head_dim} or none`);
      for (const name of counts) if (isOther(name, 0)) throw this.invalid(name, "0 or none");
      return {};
    }
    const localHeadDim = this.size(LOCAL_SIZES[0]);
    for (const name of LOCAL_SIZES) if (isOther(name, localHeadDim)) throw this.invalid(name, `${KEYS.local_head_dim}=${localHeadDim}`);
    const [nSharedKvLayers, layerInputDim] = counts.map((name) => {
      const value = this.given[name] ?? 0;
      if (!Number.isInteger(value) || (value as number) < 0) throw this.invalid(name, "an integer of at least 0");
      return value as number;
    });
    const sizes = { localHeadDim, nSharedKvLayers, layerInputDim };
    const { ffn_dim: widths } = this.given;
    if (!Array.isArray(widths) || new Set(widths).size < 2) return sizes;
    const width = widths[0] as number;
    const ffnDims = widths.map((_, i) => (i < widths.length - nSharedKvLayers ? 1 : 2) * width);
    if (ffnDims.join() !== widths.join()) throw this.invalid("ffn_dim", "one width, and twice that in the layers without keys and values");
    this.given.ffn_dim = width;
    return { ...sizes, ffnDims };
  }

  /** Return the widths of all blocks, 0 or one size, which ffn_dim becomes. */
  widths(): number[] {
    const { ffn_dim: value, n_layers: n } = this.given;
    if (!Array.isArray(value) || value.length !== n || new Set([0, ...value]).size > 2) throw this.invalid("ffn_dim", `0 or one size for each of ${n} layers`);
    this.given.ffn_dim = Math.max(1, ...(value as number[]));
    return value as number[];
  }

  /** Whether the architecture has layers that do not attend, of a family that also has others. */
  isHybrid = ({ name, mixer }: Family) => mixer === "mamba" && [GGUF[name]?.hybrid, GGUF[name]?.mixture].includes(this.architecture);

  /** Return the architecture's family; of several, the one with a window if the file has a window. */
  family(): Family {
    const known = Object.values(FAMILIES).filter((family) => GGUF[family.name]?.architecture === this.architecture || this.isHybrid(family));
    const shared = known.filter(({ keys }) => "shared_dim" in keys);
    const all = this.given.shared_dim && shared.length > 0 ? shared : known;
    const switched = all.find((family) => family.rope_option !== "");
    if (this.given.is_rotated === false && switched !== undefined) return switched;
    if (!this.given.sliding_window) return all[0];
    const found = all.find((family) => family.window === "all" || family.window === "pattern");
    if (found === undefined) throw this.invalid("sliding_window", "none: this architecture does not specify which layers have a window");
    return found;
  }
}

async function readF32(tensor: Tensor | undefined, reader: Reader, where: string): Promise<number[] | undefined> {
  if (tensor === undefined) return undefined;
  if (tensor.type !== "F32" || tensor.shape.length !== 1) {
    throw new WhetError(`${where}: ${tensor.name} is ${tensor.type} of ${tensor.shape.length} axes, expected F32 of one.`);
  }
  const bytes = (await reader.read(tensor.offset, tensor.sizeBytes)).slice();
  return Array.from(new Float32Array(bytes.buffer));
}

/** Return the config of a file's model and the slots of its tensors. `lengthOf`: maps the trained context length to the engine's. */
export async function describeGguf(
  core: Core,
  file: GgufFile,
  reader: Reader,
  lengthOf: (trained: number) => number,
  caller: string,
): Promise<{ config: ModelConfig; family: Family; slices: RowSlice[] }> {
  const where = `${caller}: ${reader.name}`;
  const meta = new GgufOptions(file, where);
  const family = withExperts(meta.family(), meta.get("n_experts") !== undefined && meta.get("n_experts") !== 0);
  const { modules: own, scale_by_hidden, sliding_window, ignored = [] } = GGUF[family.name];
  for (const name of meta.isHybrid(family) ? [] : ignored) meta.drop(name);
  const modules = [...file.tensors.keys()].some((name) => FUSED_EXPERTS.test(name)) ? withFusedExperts(own) : own;
  const moduleName = (slot: string) => modules[slot].names[0].replace("{i}", "0");
  const widths = family.one_only ? meta.widths() : [];
  const layers = meta.layerSizes(family);
  const [nBlocks, trained, hiddenDim, ffnDim, nHeads] = ["n_layers", "max_position", "hidden_dim", "ffn_dim", "n_heads"].map((name) => meta.size(name, name === "ffn_dim" ? (meta.get("expert_dim") as number) : undefined));
  const nLayers = nBlocks - (meta.get("n_predicting") ? meta.size("n_predicting") : 0); // without the blocks that predict more tokens
  if (nLayers < 1) throw meta.invalid("n_predicting", `an integer below ${nBlocks}`);
  if (hiddenDim % nHeads !== 0 && meta.get("head_dim") === undefined) throw meta.invalid("hidden_dim", `a multiple of ${KEYS.n_heads}=${nHeads}`);
  const { nKvHeads = meta.size("n_kv_heads", nHeads), ...mixers } = readMixers(meta, family, nLayers, nBlocks, widths);
  const headDim = meta.size("head_dim", Math.trunc(hiddenDim / nHeads));
  if (meta.size("value_dim", headDim) !== headDim) throw meta.invalid("value_dim", `${KEYS.head_dim}=${headDim}`);
  for (const [name, value, implied] of [["n_kv_heads", nKvHeads, nHeads], ["head_dim", headDim, Math.trunc(hiddenDim / nHeads)]] as const) {
    if (!(name in family.keys) && value !== implied) throw meta.invalid(name, `${implied} for this architecture`);
  }
  if (nHeads % nKvHeads !== 0) throw meta.invalid("n_heads", `a multiple of ${KEYS.n_kv_heads}=${nKvHeads}`);
  const epsilon = ["rms_norm_eps", "layer_norm_eps"].find((name) => meta.get(name) !== undefined);
  if (epsilon === undefined) throw meta.invalid("rms_norm_eps", "a number above 0");
  const table = file.tensors.get(`${moduleName("embedding")}.weight`);
  if (table?.shape.length !== 2) throw new WhetError(`${where}: tensor ${moduleName("embedding")}.weight with two axes, the embedding, is missing.`);
  const hasBias = (slot: string) => slot in modules && Array.from({ length: nLayers }, (_, i) => `${modules[slot].names[0].replace("{i}", String(i))}.bias`).some((name) => file.tensors.has(name));
  const fused = (NAMES.fused_qkv as string).replace("{i}", "0");
  const biases: Record<string, boolean> = {
    qkv_bias: hasBias("layers.{i}.qkv") || hasBias("layers.{i}.qkv:q") || file.tensors.has(`${fused}.bias`),
    o_bias: hasBias("layers.{i}.o"),
    mlp_bias: hasBias("layers.{i}.gate_up:gate") || hasBias("layers.{i}.up"),
  };
  const options: Record<string, unknown> = {
    ...family.defaults,
    ...toBiasOptions(family, biases),
    norm_topk_prob: GGUF[family.name].scaled ? meta.get("router_normalised") : GGUF[family.name].normalised,
    use_expert_bias: [...file.tensors.keys()].some((name) => name.endsWith(NAMES.correction)),
    use_parallel_residual: meta.get("use_parallel_residual") ?? true,
  };
  const isScaled = (meta.get("query_log_scale") ?? 0) !== 0;
  if (!family.query_scale && isScaled) throw meta.invalid("query_log_scale", "0 or none");
  const experts = readExperts(meta, family, ffnDim, nLayers, widths);
  const length = lengthOf(trained);
  if (!(Number.isInteger(length) && length >= 1)) throw new WhetError(`${where}: contextLength is ${show(length)}, expected an integer of at least 1.`);
  const rotary = await readRotary(core, meta, family, file, reader, headDim, trained, length, where);
  if ("positions" in modules && length > trained) throw new WhetError(`${where}: contextLength is ${length}, expected at most ${trained}, the model's learned positions.`);
  const fallback = sliding_window ?? 0;
  const window = family.window === "none" ? 0 : meta.get("sliding_window") ? meta.size("sliding_window") : fallback;
  const flags = readWindowLayers(meta, family, nLayers);
  const isLocal = (i: number) => flags?.[i] ?? (family.window !== "pattern" || allButEvery(family.defaults.sliding_window_pattern as number, nLayers, family.full_first)[i]);
  if (layers.localHeadDim !== undefined && isLocal(nLayers - 1)) throw meta.invalid("window_layers", "false for the last layer");
  const config: ModelConfig = {
    ...PLAIN,
    nLayers, nHeads, nKvHeads, headDim, hiddenDim, ffnDim,
    vocabSize: table.shape[0],
    maxPosition: length,
    normEps: meta.number(epsilon),
    learnedPositions: "positions" in modules ? trained : 0,
    activation: (activations as Record<string, string>)[family.defaults.activation as string] as ModelConfig["activation"],
    windows: Array.from({ length: nLayers }, (_, i) => (window < length && isLocal(i) ? window : 0)),
    ...readScales(core, meta, family, nLayers === scale_by_hidden ? Math.trunc(hiddenDim / nHeads) : headDim, { headDim, hiddenDim }),
    ...readLocalRotary(core, meta, family, nLayers, layers.localHeadDim ?? headDim, length, isLocal, where),
    ...layers,
    ropeLayers: readRopeLayers(meta, family, nLayers, window > 0 ? isLocal : undefined),
    tiedHead: !file.tensors.has(`${moduleName("head")}.weight`),
    ...mixers,
    ...rotary,
    ...(isScaled ? { queryLogScale: meta.number("query_log_scale"), queryScaleLength: meta.size("original_max_position_embeddings", trained) } : {}),
    ...settingsOf(family, (option) => Boolean(options[option]), experts.nExperts),
    ...experts,
  };
  return { config, family, slices: placeTensors(config, modules, file, nBlocks, where) };
}

const FUSED_EXPERTS = new RegExp(`^${NAMES.fused_experts.replace("{i}", "\\d+")}\\.weight$`);

/** Return the modules of a file with the experts' gates and up projections in one tensor. */
const withFusedExperts = (modules: Record<string, ModuleSpec>): Record<string, ModuleSpec> => ({
  ...Object.fromEntries(Object.entries(modules).filter(([target]) => !target.includes("experts_gate_up:"))),
  "layers.{i}.experts_gate_up": { names: [NAMES.fused_experts] },
});

const EXPERT_KEYS = ["n_experts", "n_used_experts", "expert_dim", "shared_dim", "router", "router_normalised", "n_dense_layers"];

/** Return the fields of a mixture of experts, if the family is one. */
function readExperts(meta: GgufOptions, family: Family, ffnDim: number, nLayers: number, widths: number[]): Partial<ModelConfig> {
  const { normalised: fixed, scaled } = GGUF[family.name];
  const scale = (meta.get("router_scale") as number) || 1;
  if (!scaled && scale !== 1) throw meta.invalid("router_scale", "1 or none");
  if (!("n_experts" in family.keys) || (family.one_only && !meta.get("n_experts"))) {
    const given = EXPERT_KEYS.find((name) => (meta.get(name) ?? 0) !== 0);
    if (given !== undefined) throw meta.invalid(given, "0 or none");
    return {};
  }
  const normalised = scaled ? (meta.get("router_normalised") ?? false) : fixed;
  const router = family.settings.router === "sigmoid" ? 2 : 1;
  if ((meta.get("router_normalised") ?? normalised) !== normalised) throw meta.invalid("router_normalised", `${normalised} or none`);
  if ((meta.get("router") ?? router) !== router) throw meta.invalid("router", `${router} or none`);
  const count = (name: string) => (name in family.keys && meta.get(name) ? meta.size(name) : 0);
  const [nExperts, nUsedExperts, nDense] = [meta.size("n_experts"), meta.size("n_used_experts"), count("n_dense_layers")];
  if (nUsedExperts > nExperts) throw meta.invalid("n_used_experts", `at most ${KEYS.n_experts}=${nExperts}`);
  if (nDense >= nLayers) return {};
  const moeLayers = family.one_only ? widths.slice(0, nLayers).map(Boolean) : nDense > 0 ? Array.from({ length: nLayers }, (_, i) => i >= nDense) : [];
  return { nExperts, nUsedExperts, expertDim: meta.size("expert_dim", ffnDim), sharedDim: count("shared_dim"), moeLayers, routerScale: scale };
}

/** Rename the bias flags, found by the file's tensors, to the family's options. */
function toBiasOptions(family: Family, biases: Record<string, boolean>): Record<string, boolean> {
  const found: Record<string, boolean> = {};
  for (const [field, has] of Object.entries(biases)) {
    const option = family.settings[field];
    if (typeof option === "string") found[option.slice(1)] ??= has;
  }
  return found;
}

/** Return the factors that only some families have. `scaled`: query_pre_attn_scalar, which is not in the file. */
function readScales(core: Core, meta: GgufOptions, family: Family, scaled: number, c: Pick<ModelConfig, "headDim" | "hiddenDim">) {
  const given = (name: string, fallback: number): number => {
    if (name in family.keys) return meta.number(name, fallback);
    if (Math.abs(Number(meta.get(name) ?? fallback) - fallback) > 1e-6 * fallback) throw meta.invalid(name, `${fallback} or none`);
    return fallback;
  };
  const implied = "query_pre_attn_scalar" in family.defaults ? core.call("power", scaled, -0.5) : 1 / Math.sqrt(c.headDim);
  return {
    attentionScale: given("attention_scale", implied),
    attentionSoftcap: given("attention_softcap", (family.defaults.attention_softcap as number) ?? 0),
    embeddingScale: given("embedding_scale", family.root_of_embedding ? Math.sqrt(c.hiddenDim) : 1),
    residualScale: given("residual_scale", 1),
    logitsScale: 1 / given("logits_divisor", 1),
    logitsSoftcap: given("logits_softcap", (family.defaults.logits_softcap as number) ?? 0),
  };
}

/** Return whether each layer has a window, if the file names the layers. */
function readWindowLayers(meta: GgufOptions, family: Family, nLayers: number): boolean[] | undefined {
  const value = meta.get("window_layers");
  if (value === undefined || (family.window !== "pattern" && !meta.get("sliding_window"))) return undefined;
  if (family.window !== "pattern") throw meta.invalid("window_layers", "none");
  if (!Array.isArray(value)) return allButEvery(meta.size("window_layers"), nLayers);
  return meta.flags("window_layers", nLayers);
}

const DELTA_KEYS = ["delta_conv_length", "delta_key_dim", "n_delta_key_heads", "n_delta_heads", "delta_values", "recurrent_layers", "full_attention_interval"];

/** Return what mixes the tokens of each layer; and, if the file lists them, the KV heads of layers that attend. */
function readMixers(meta: GgufOptions, family: Family, nLayers: number, nBlocks: number, widths: number[]): Partial<ModelConfig> {
  const mixer = family.mixer !== "mamba" || family.one_only || meta.isHybrid(family) ? family.mixer : "";
  const known: string[] = { "": [], conv: ["conv_length"], delta: DELTA_KEYS, mamba: DELTA_KEYS.slice(0, 5) }[mixer];
  for (const name of ["conv_length", ...DELTA_KEYS]) {
    if (meta.get(name) !== undefined && !known.includes(name)) throw meta.invalid(name, "none");
  }
  if (mixer === "") return {};
  if (mixer === "delta") return readDeltaRules(meta, nLayers, nBlocks);
  const given = meta.get("n_kv_heads");
  if (!Array.isArray(given)) return {};
  const heads = family.one_only ? given.slice(0, nLayers).map((n, i) => (widths[i] ? 0 : n)) : given;
  const [nKvHeads = 1, ...others] = heads.filter((n) => n !== 0) as number[];
  if (heads.length !== nLayers || !others.every((n) => n === nKvHeads)) throw meta.invalid("n_kv_heads", `${nLayers} numbers, the same in all layers that attend`);
  const mixers = heads.map((n, i) => (widths[i] ? "none" : n === 0 ? mixer : "attention"));
  if (family.one_only) return { nKvHeads, mixers, ffnDims: widths.slice(0, nLayers), ...readStateSizes(meta) };
  return mixers.includes(mixer) ? { nKvHeads, mixers, ...(mixer === "conv" ? { convLength: meta.size("conv_length") } : readStateSizes(meta)) } : { nKvHeads };
}

/** Return the layers with the gated delta rule, which the file names, or all except every fourth, and its sizes. */
function readDeltaRules(meta: GgufOptions, nLayers: number, nBlocks: number): Partial<ModelConfig> {
  const isListed = meta.get("recurrent_layers") !== undefined;
  const flags = isListed ? meta.flags("recurrent_layers", nLayers, nBlocks) : allButEvery(meta.size("full_attention_interval", 4), nLayers);
  const sizes = readStateSizes(meta);
  const mixers = flags.map((flag) => (flag ? "delta" : "attention"));
  return mixers.includes("delta") ? { mixers, ...sizes, deltaTiled: sizes.nDeltaHeads !== sizes.nDeltaKeyHeads } : {};
}

/** Return the sizes of layers whose heads have a matrix as state. */
function readStateSizes(meta: GgufOptions) {
  const [convLength, deltaKeyDim, nDeltaKeyHeads, nDeltaHeads, values] = DELTA_KEYS.slice(0, 5).map((name) => meta.size(name));
  if (values % nDeltaHeads !== 0) throw meta.invalid("delta_values", `a multiple of ${KEYS.n_delta_heads}=${nDeltaHeads}`);
  return { convLength, deltaKeyDim, nDeltaKeyHeads, nDeltaHeads, deltaDim: values / nDeltaHeads };
}

/** Return whether RoPE applies to each layer; empty: to all. `isLocal`: whether a layer has a window; undefined: none has. */
function readRopeLayers(meta: GgufOptions, family: Family, nLayers: number, isLocal: ((i: number) => boolean) | undefined): boolean[] {
  const value = meta.get("rope_layers");
  if (value !== undefined) {
    if (!family.rope_by_layer) throw meta.invalid("rope_layers", "none");
    const layers = meta.flags("rope_layers", nLayers);
    return layers.includes(false) ? layers : [];
  }
  if (family.rope_windowed && isLocal !== undefined) return Array.from({ length: nLayers }, (_, i) => isLocal(i));
  return family.rope_off ? allButEvery(family.defaults.no_rope_layer_interval as number, nLayers) : [];
}

/** Return the frequencies of layers with their own RoPE base; files may omit it. */
function readLocalRotary(core: Core, meta: GgufOptions, family: Family, nLayers: number, headDim: number, length: number, isLocal: (i: number) => boolean, where: string): Partial<ModelConfig> {
  const name = "rope_local_base_freq";
  const localLayers = Array.from({ length: nLayers }, (_, i) => isLocal(i));
  if (!family.rope_local && meta.get(name) !== undefined) throw meta.invalid(name, "none");
  if (!family.rope_local || !localLayers.includes(true)) return {};
  const theta = meta.number(name, (family.defaults[name] as number) ?? meta.number("rope_theta", 10000));
  const { invFreq } = ropeFrequencies(core, headDim, undefined, length, { rope_theta: theta }, where);
  return { localLayers, localInvFreq: invFreq };
}

/** Return the RoPE frequencies of the file's settings and tensors. */
async function readRotary(
  core: Core, meta: GgufOptions, family: Family, file: GgufFile, reader: Reader, headDim: number, trained: number, length: number, where: string,
): Promise<Partial<ModelConfig>> {
  if (family.rope === "none" || (family.rope_option !== "" && meta.get("is_rotated") === false)) return {};
  const rotaryDim = meta.size("rotary_dim", headDim);
  if (rotaryDim !== headDim && !family.partial_rotary) throw meta.invalid("rotary_dim", `the whole head, ${headDim}`);
  const names = NAMES.rope_tensors;
  const kind = (meta.get("rope_type") ?? "none") as "none" | "linear" | "yarn";
  const [shortFactor, longFactor] = await Promise.all([names.short_factor, names.long_factor].map((name) => readF32(file.tensors.get(name), reader, where)));
  const isLong = shortFactor !== undefined || longFactor !== undefined;
  if (!isLong && kind !== "none" && kind !== "linear" && kind !== "yarn") {
    throw meta.invalid("rope_type", "none, linear, yarn, or longrope with rope_factors tensors");
  }
  const given = meta.number("attention_factor", 1);
  const factor = meta.number("factor", 1);
  const growth = 0.1 * core.call("logarithm", Math.max(factor, 1));
  const multiplier = meta.get("yarn_log_multiplier") ?? 0;
  if (typeof multiplier !== "number" || !(multiplier >= 0)) throw meta.invalid("yarn_log_multiplier", "a number of at least 0");
  const yarn = (given * (growth + 1)) / (growth * multiplier + 1);
  const original = isLong || kind === "yarn" ? meta.size("original_max_position_embeddings", trained) : trained;
  const extended = { original_max_position_embeddings: original };
  const scalings = {
    none: () => ({}),
    linear: () => ({ rope_type: "linear", factor }),
    yarn: () => ({
      rope_type: "yarn", factor, ...extended,
      attention_factor: meta.get("attention_factor") !== undefined ? yarn : meta.number("yarn_attention_factor", yarn),
      beta_fast: meta.number("beta_fast", 32), beta_slow: meta.number("beta_slow", 1),
      truncate: (family.defaults.rope_parameters as { truncate?: boolean } | undefined)?.truncate ?? true,
    }),
    longrope: () => ({ rope_type: "longrope", factor: trained / original, ...extended, attention_factor: given, short_factor: shortFactor, long_factor: longFactor }),
  };
  const settings = { rope_theta: meta.number("rope_theta", 10000), ...scalings[isLong ? "longrope" : kind]() };
  const found = ropeFrequencies(core, headDim, rotaryDim, length, settings, where);
  if (!isLong && kind !== "yarn") found.attentionFactor *= given; // llama.cpp applies it to every scaling
  const divisors = await readF32(file.tensors.get(names.divisors), reader, where);
  if (divisors !== undefined) {
    if (divisors.length !== found.invFreq.length || !divisors.every((x) => x > 0 && x < Infinity)) {
      throw new WhetError(`${where}: ${names.divisors} has ${divisors.length} numbers, expected ${found.invFreq.length} finite numbers above 0.`);
    }
    found.invFreq = found.invFreq.map((f, i) => f / divisors[i]);
  }
  return { rotaryDim: 2 * found.invFreq.length, isNeox: family.rope === "neox", ...found };
}

/** Map the tensors to slots. Every tensor of the file must be used. */
function placeTensors(config: ModelConfig, modules: Record<string, ModuleSpec>, file: GgufFile, nBlocks: number, where: string): RowSlice[] {
  const used = new Set<string>(Object.values(NAMES.rope_tensors as Record<string, string>));
  const find = ([module]: string[], suffix: string, location: WeightLocation): StoredTensor => {
    const own = file.tensors.get(`${module}.${suffix}`);
    const fused = ["q", "k", "v"].includes(location.part) ? file.tensors.get(`${NAMES.fused_qkv.replace("{i}", String(location.layer))}.${suffix}`) : undefined;
    if (own !== undefined && fused !== undefined) throw new WhetError(`${where}: the file has both ${fused.name} and ${own.name}. Convert the model again.`);
    const tensor = own ?? fused;
    if (tensor === undefined) throw new WhetError(`${where}: tensor ${module}.${suffix} is missing. The file is incomplete.`);
    used.add(tensor.name);
    if (tensor === own) return { tensor, row: 0, shape: tensor.shape };
    if (tensor.shape[0] !== location.rows) throw new WhetError(`${where}: ${tensor.name} has ${tensor.shape[0]} rows, expected ${location.rows} of q, k and v.`);
    return { tensor, row: location.firstRow, shape: [location.count, ...tensor.shape.slice(1)] };
  };
  const slices = listSlices(config, modules, find, where);
  const isPredicting = (name: string) => {
    const block = Number(name.split(".")[1]);
    return block >= config.nLayers && block < nBlocks;
  };
  const unread = unreadModules(config, modules);
  const unknown = [...file.tensors.keys()].filter((name) => !used.has(name) && !isPredicting(name) && !unread.has(moduleOf(name))).sort()[0];
  if (unknown !== undefined) throw new WhetError(`${where}: unexpected tensor ${unknown} for this architecture.`);
  return slices;
}
