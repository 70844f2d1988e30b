/** Hugging Face model families: translates a config.json into the engine's ModelConfig.
 *
 * Tables and rules are from whet.models.families. (gguf.ts translates GGUF metadata on its own: a page with GGUF files does not
 * download this file.) */
import type { Core } from "../core/core.js";
import { show, WhetError } from "../core/errors.js";
import { activations, hfModules, kinds as KINDS, largest, largestSize, mixerSizes, notRun, olderKinds, plain as NEUTRAL, textParts, unlimited } from "../facts.js";
import { allButEvery, FAMILIES, type Family, type ModelConfig, merge, PLAIN, settingsOf, toCamel, withExperts } from "./architecture.js";
import { ropeFrequencies } from "./rope.js";
import { type ModuleSpec, storedModules } from "./slices.js";

/** Modules of Hugging Face models, by family and slot. */
export const HF_MODULES: Record<string, Record<string, ModuleSpec>> = /* @__PURE__ */ merge(hfModules);

/** Contents of a config.json. */
export type HfConfig = Readonly<Record<string, unknown>>;

/** Return why a model_type is not supported, as the end of a sentence; "" if unknown. */
const unsupportedReason = (name: unknown) => {
  const [reason] = Object.entries(notRun).find(([, names]) => (names as readonly unknown[]).includes(name)) ?? [];
  return reason === undefined ? "" : `, which has ${reason}`;
};

/** Return the config of the language model: the text_config of a vision-language model, else the config itself. */
export function textOptions(given: HfConfig): HfConfig {
  const { text_config: text, model_type: name } = given;
  const [, defaults] = Object.entries(textParts.models).find(([key]) => key === name) ?? [];
  if (defaults === undefined || !isObject(text)) return given;
  const outer = ["tie_word_embeddings", "quantization_config"].filter((key) => key in given);
  return { ...defaults, ...text, ...Object.fromEntries(outer.map((key) => [key, given[key]])) };
}

/** Return the modules of a folder's tensors, with their names in a vision-language model if it is one. */
export function modulesOf(given: HfConfig, family: Family, tensors: Iterable<string>): Record<string, ModuleSpec> {
  const modules = storedModules(HF_MODULES[family.name], tensors);
  if (textOptions(given) === given) return modules;
  const prefix = `${modules.embedding.names[0].split(".")[0]}.`;
  const rename = (slot: string, name: string) => (slot === "head" ? textParts.heads : textParts.prefixes.map((begin) => begin + name.slice(prefix.length)));
  return Object.fromEntries(Object.entries(modules).map(([slot, module]) => [slot, { ...module, names: [...rename(slot, module.names[0])] }]));
}

export function familyOf(given: HfConfig, where: string): Family {
  const name = textOptions(given).model_type;
  if (typeof name !== "string" || !Object.hasOwn(FAMILIES, name)) {
    throw new WhetError(`${where}: model_type is ${show(name)}${unsupportedReason(name)}; supported: ${Object.keys(FAMILIES).sort().join(", ")}.`);
  }
  const family = FAMILIES[name];
  return withExperts(family, (given.num_local_experts ?? family.defaults.n_experts) !== 0);
}

/** Return the context length that the model was trained for, in tokens. */
export const trainedContext = (given: HfConfig, where: string) => {
  const options = new Options(given, familyOf(given, where), where);
  return options.size("max_position");
};

/** Whether a model has a second embedding. */
export const hasTable = (given: HfConfig, where: string) => {
  const options = new Options(given, familyOf(given, where), where);
  return "layer_input_dim" in options.family.keys && options.get("layer_input_dim") !== 0;
};

const isObject = (value: unknown): value is Record<string, unknown> => typeof value === "object" && value !== null && !Array.isArray(value);

/** Checked access to a config under the family's names and with its defaults. */
class Options {
  readonly given: HfConfig;
  constructor(
    whole: HfConfig,
    readonly family: Family,
    readonly where: string,
  ) {
    const given = textOptions(whole);
    const key = family.keys.n_experts;
    const other = ["num_experts", "num_local_experts"].find((name) => key !== undefined && name !== key && name in given); // of transformers 5
    this.given = other === undefined ? given : { [key]: given[other], ...Object.fromEntries(Object.entries(given).filter(([name]) => name !== other)) };
    for (const [name, old] of Object.entries(family.older)) if (old in given) this.given = { ...this.given, [name]: given[old] };
    const sizes = this.given.per_layer_config;
    if ("local_head_dim" in family.keys && isObject(sizes)) this.given = { ...this.given, [family.keys.head_dim]: this.fullHeadDim(sizes), per_layer_config: null };
    if (!family.one_only) return;
    const { hybrid_override_pattern: pattern, layer_types: alias } = given;
    const kinds = this.given[family.keys.layer_types] ?? alias ?? (typeof pattern === "string" ? [...pattern] : family.defaults.layer_types);
    this.given = { ...this.given, [family.keys.layer_types]: kinds, [family.keys.n_layers]: (kinds as unknown[]).length };
  }

  get(name: string): unknown {
    const key = this.family.keys[name] ?? name;
    return key in this.given ? this.given[key] : this.family.defaults[name];
  }

  invalid(name: string, expected: string): WhetError {
    return new WhetError(`${this.where}: ${this.family.keys[name] ?? name} is ${show(this.get(name))}, expected ${expected}.`);
  }

  rejectUnsupported(): void {
    for (const [name, values] of Object.entries({ ...(NEUTRAL as unknown as Record<string, unknown[]>), ...this.family.plain })) {
      const value = name in this.given ? this.given[name] : this.family.defaults[name];
      const isFamilyKey = Object.values(this.family.keys).includes(name);
      if (value !== undefined && !isFamilyKey && !values.some((plain) => JSON.stringify(plain) === JSON.stringify(value))) {
        throw new WhetError(`${this.where}: ${name} is ${show(value)}, which is not supported for ${this.given.model_type}; expected ${show(values.at(-1))}.`);
      }
    }
  }

  size(name: string, fallback?: number): number {
    const value = (name in this.family.keys || name === "vocab_size" ? this.get(name) : undefined) ?? fallback;
    const limit = (largest as Record<string, number>)[name] ?? largestSize;
    if (!isCount(value, 1) || value > limit) throw this.invalid(name, `an integer from 1 to ${limit}`);
    return value;
  }

  count(name: string, least: number): number {
    const value = this.get(name);
    if (!isCount(value, least)) throw this.invalid(name, `an integer of at least ${least}`);
    return value;
  }

  number(name: string): number {
    const value = this.get(name);
    if (typeof value !== "number" || !Number.isFinite(value)) throw this.invalid(name, "a finite number");
    return value;
  }

  /** Return the head size of the layers with full attention from the sizes of single layers (transformers 5). */
  private fullHeadDim(sizes: Record<string, unknown>): unknown {
    const kinds = (this.get("layer_types") ?? []) as unknown[];
    const full = kinds.flatMap((kind, i) => (kind === "full_attention" ? [String(i)] : []));
    const [first, ...others] = Object.values(sizes);
    const isOne = Object.keys(sizes).sort().join() === full.sort().join() && others.every((each) => JSON.stringify(each) === JSON.stringify(first));
    if (!isOne || !isObject(first) || Object.keys(first).join() !== "head_dim") throw this.invalid("per_layer_config", "one head_dim of all layers with full_attention, and no other size");
    return first.head_dim;
  }

  /** Return the fields of layers of different sizes, shared keys and values, and inputs by token. */
  layerSizes(nLayers: number): Partial<ModelConfig> {
    const { keys } = this.family;
    if (!("local_head_dim" in keys)) return {};
    const local = this.localLayers(nLayers);
    if (local[nLayers - 1]) throw this.invalid("layer_types", "full_attention in the last layer");
    const [nSharedKvLayers, layerInputDim] = ["n_shared_kv_layers", "layer_input_dim"].map((name) => this.count(name, 0));
    if (nSharedKvLayers >= nLayers) throw this.invalid("n_shared_kv_layers", `an integer below ${keys.n_layers}=${nLayers}`);
    if (layerInputDim > 0 && this.get("vocab_size_per_layer_input") !== this.get("vocab_size")) throw this.invalid("vocab_size_per_layer_input", `vocab_size=${show(this.get("vocab_size"))}`);
    const isDouble = nSharedKvLayers > 0 && this.flag("use_double_wide_mlp");
    const ffnDims = isDouble ? Array.from(local, (_, i) => (i < nLayers - nSharedKvLayers ? 1 : 2) * this.size("ffn_dim")) : [];
    return { nSharedKvLayers, layerInputDim, ffnDims, localHeadDim: local.includes(true) ? this.size("local_head_dim") : 0 };
  }

  ffnDim(hiddenDim: number): number {
    if (this.family.one_only && !this.isKind("mlp").includes(true)) return this.isKind("moe").includes(true) ? this.size("expert_dim") : 1; // of no layer
    const given = this.size("ffn_dim", this.family.keys.ffn_dim === "n_inner" ? 4 * hiddenDim : undefined);
    if (!this.family.ffn_adjusted) return given;
    const whole = this.given.block_ff_dim === undefined ? given : this.count("block_ff_dim", 1); // of older configs
    if (!this.flag("block_auto_adjust_ff_dim")) return whole;
    const factor = (this.get("block_ffn_dim_multiplier") ?? null) === null ? 1 : this.number("block_ffn_dim_multiplier");
    const multiple = this.count("block_multiple_of", 1);
    return Math.ceil(Math.trunc(factor * Math.trunc((2 * whole) / 3)) / multiple) * multiple;
  }

  tiedHead(): boolean {
    const older = this.family.mixer === "conv" ? (this.given.tie_embedding ?? null) : null;
    if (older !== null && typeof older !== "boolean") throw new WhetError(`${this.where}: tie_embedding is ${show(older)}, expected true or false.`);
    return older === null ? this.flag("tie_word_embeddings") : (older as boolean);
  }

  /** Return what mixes the tokens of each layer. */
  mixers(nLayers: number): Partial<ModelConfig> {
    const { mixer, keys } = this.family;
    if (mixer === "") return {};
    const attends = this.attending(nLayers);
    const kinds = this.kinds() ?? Array.from({ length: nLayers }, (_, i) => (attends(i) ? "full_attention" : KINDS[mixer]));
    if (!Array.isArray(kinds) || kinds.length !== nLayers) throw this.invalid("layer_types", `${nLayers} of ${KINDS[mixer]} and full_attention`);
    const isOther = (kind: unknown) => this.family.one_only && kind !== "full_attention";
    const mixers = kinds.map((kind) => (kind === KINDS[mixer] ? mixer : isOther(kind) ? "none" : "attention"));
    const ofBlocks: Partial<ModelConfig> = this.family.one_only ? { mixers, ffnDims: this.isKind("mlp").map((is) => (is ? this.size("ffn_dim") : 0)) } : {};
    if (!mixers.includes(mixer)) return ofBlocks;
    const least = "delta_step_min" in keys ? this.number("delta_step_min") : 0;
    const limit = this.get("time_step_limit") ?? null;
    if (mixer === "mamba" && limit !== null && JSON.stringify(limit) !== JSON.stringify(unlimited[0])) throw this.invalid("time_step_limit", "0 and infinity, or null");
    const isImplied = mixer === "mamba" && [null, "auto"].includes((this.get("delta_dim") ?? null) as string | null);
    const implied = () => Math.trunc((this.size("hidden_dim") * this.size("expansion")) / this.size("n_delta_heads"));
    const sizes = mixerSizes.filter((name) => name in keys).map((name) => [toCamel(name), isImplied && name === "delta_dim" ? implied() : this.size(name)]);
    return { mixers, ...ofBlocks, deltaStepMin: least > 1e-30 ? least : 0, ...Object.fromEntries(sizes) };
  }

  /** Whether each layer is of a kind. */
  private isKind = (name: string) => (this.kinds() as unknown[]).map((kind) => kind === name);

  /** Return layer_types, with the names of current configs. */
  private kinds(): unknown {
    const kinds = this.get("layer_types") ?? undefined;
    return Array.isArray(kinds) ? kinds.map((kind) => (olderKinds as Record<string, string>)[kind] ?? kind) : kinds;
  }

  /** Return the fields of a mixture of experts, if a layer is one. */
  experts(nLayers: number): Partial<ModelConfig> {
    const { keys } = this.family;
    const layers = keys.n_experts !== undefined && this.get("n_experts") !== 0 ? this.moeLayers(nLayers) : [];
    if (!layers.includes(true)) return {};
    const [nExperts, nUsedExperts, expertDim] = ["n_experts", "n_used_experts", "expert_dim"].map((name) => this.size(name));
    if (nUsedExperts > nExperts) throw this.invalid("n_used_experts", `at most ${keys.n_experts}=${nExperts}`);
    return {
      nExperts, nUsedExperts, expertDim,
      sharedDim: "shared_dim" in keys ? this.count("shared_dim", 0) : 0,
      routerScale: "router_scale" in keys ? this.number("router_scale") : 1,
      moeLayers: layers.includes(false) ? layers : [],
    };
  }

  private moeLayers(nLayers: number): boolean[] {
    const layers = Array.from({ length: nLayers }, (_, i) => i);
    if (this.family.one_only) return this.isKind("moe");
    if ("n_dense_layers" in this.family.keys) return layers.map((i) => i >= this.count("n_dense_layers", 0));
    if (!("decoder_sparse_step" in this.family.defaults)) return layers.map(() => true);
    const dense = this.get("mlp_only_layers") ?? [];
    if (!Array.isArray(dense)) throw this.invalid("mlp_only_layers", "a list of layers, or null");
    return layers.map((i) => !dense.includes(i) && (i + 1) % this.count("decoder_sparse_step", 1) === 0);
  }

  /** Return which layers attend without layer_types. */
  private attending(nLayers: number): (i: number) => boolean {
    if (this.family.mixer === "mamba") return () => false;
    if ((this.get("full_attention_interval") ?? null) !== null) {
      const others = allButEvery(this.count("full_attention_interval", 1), nLayers);
      return (i) => !others[i];
    }
    const attending = this.get("full_attn_idxs") ?? undefined;
    if (attending === undefined) return () => true;
    if (!(Array.isArray(attending) && attending.every((i) => isCount(i, 0) && i < nLayers))) throw this.invalid("full_attn_idxs", `indices of ${nLayers} layers`);
    return (i) => attending.includes(i);
  }

  /** Return a factor that only some families have. */
  scale(name: string, fallback = 1): number {
    if (!(name in this.family.keys)) return fallback;
    const value = this.number(name);
    if (!(value > 0)) throw this.invalid(name, "a number above 0");
    return value;
  }

  /** Return a soft-cap that only some families have; 0: none. */
  softcap(name: string): number {
    if (!(name in this.family.keys) || (this.get(name) ?? null) === null) return 0;
    const value = this.number(name);
    if (!(value > 1e-6 && value < 1e6)) throw this.invalid(name, "a number from 1e-6 to 1e6, or null");
    return value;
  }

  flag(name: string): boolean {
    const value = this.get(name) ?? false;
    if (typeof value !== "boolean") throw this.invalid(name, "true or false");
    return value;
  }

  activation(): ModelConfig["activation"] {
    const [, found] = Object.entries(activations).find(([name]) => name === this.get("activation")) ?? [];
    if (found === undefined) throw this.invalid("activation", `one of ${Object.keys(activations).join(", ")}`);
    return found;
  }

  /** Whether heads are rotated at all. */
  rotates(): boolean {
    const { rope, rope_option: option } = this.family;
    const value = option === "" ? "rope" : (this.get(option) ?? "nope");
    if (value !== "rope" && value !== "nope") throw this.invalid(option, "rope, nope or null");
    return rope !== "none" && value === "rope";
  }

  /** Return how queries are scaled by their position. */
  queryScale(): Partial<ModelConfig> {
    const given = this.get("rope_parameters");
    if (!this.family.query_scale || !isObject(given) || !given.llama_4_scaling_beta) return {};
    const { llama_4_scaling_beta: scale, original_max_position_embeddings: length } = given;
    if (typeof scale !== "number" || !(scale >= 0 && scale < 1e6)) throw this.invalid("rope_parameters", "llama_4_scaling_beta of at least 0");
    if (!isCount(length, 1)) throw this.invalid("rope_parameters", "original_max_position_embeddings");
    return { queryLogScale: scale, queryScaleLength: length };
  }

  ropeLayers(nLayers: number): boolean[] {
    if (this.family.rope_windowed && (this.get("sliding_window") ?? null) !== null) {
      const layers = this.localLayers(nLayers);
      return layers.includes(false) ? layers : [];
    }
    const thetas = this.layerThetas(nLayers);
    if (thetas.includes(0)) return thetas.map((theta) => theta !== 0);
    if (!this.family.rope_off) return [];
    const given = this.get("no_rope_layers") ?? undefined;
    if (given === undefined) return allButEvery(this.count("no_rope_layer_interval", 1), nLayers);
    if (!Array.isArray(given) || given.length < nLayers || !given.every((each) => each === 0 || each === 1)) throw this.invalid("no_rope_layers", `a 0 or 1 for each of ${nLayers} layers`);
    return given.slice(0, nLayers).map(Boolean);
  }

  /** Return the RoPE base of each layer, 0: no RoPE; []: rope_theta in all layers. */
  layerThetas(nLayers: number): number[] {
    const given = this.family.rope_by_layer ? (this.get("layer_rope_theta") ?? undefined) : undefined;
    if (given === undefined) return [];
    const isTheta = (value: unknown) => typeof value === "number" && value >= 0 && value < 1e300;
    if (!Array.isArray(given) || given.length !== nLayers || !given.every(isTheta)) throw this.invalid("layer_rope_theta", `a number of at least 0 for each of ${nLayers} layers`);
    if (new Set(given.filter(Boolean)).size > 2) throw this.invalid("layer_rope_theta", "at most two numbers other than 0");
    return given;
  }

  windows(nLayers: number, length: number): number[] {
    const { window: kind } = this.family;
    const isGiven = kind !== "none" && ((kind !== "some" && !("use_sliding_window" in this.family.defaults)) || this.flag("use_sliding_window")) && (this.get("sliding_window") ?? null) !== null;
    let window = isGiven ? this.count("sliding_window", 1) : 0;
    if (window >= length) window = 0; // no window gives the same result and is cheaper
    let isLocal: (i: number) => boolean = () => true;
    if (kind === "none" || kind === "all") this.rejectOtherLayers();
    if (kind === "pattern" && window > 0) {
      const layers = this.localLayers(nLayers);
      isLocal = (i) => layers[i];
    } else if (kind === "some" && window > 0) {
      const layers = this.layerTypes(nLayers);
      const full = layers === undefined ? this.count("max_window_layers", 0) : 0;
      isLocal = (i) => layers?.[i] ?? i >= full;
    }
    return Array.from({ length: nLayers }, (_, i) => (isLocal(i) ? window : 0));
  }

  private rejectOtherLayers(): void {
    const kinds = this.kinds() ?? [];
    const { mixer } = this.family;
    const known: string[] = mixer ? [KINDS[mixer], "full_attention", ...(this.family.one_only ? ["mlp", "moe"] : [])] : ["full_attention", "sliding_attention"];
    if (!Array.isArray(kinds) || !kinds.every((kind) => known.includes(kind))) throw this.invalid("layer_types", `${mixer ? known.join(" or ") : "attention"} in all layers`);
  }

  /** Whether each layer attends in a window, by layer_types; undefined without them. */
  private layerTypes(nLayers: number): boolean[] | undefined {
    const kinds = this.get("layer_types") ?? undefined;
    if (kinds === undefined) return undefined;
    const known = ["full_attention", "sliding_attention"];
    if (!Array.isArray(kinds) || kinds.length !== nLayers || !kinds.every((kind) => known.includes(kind))) throw this.invalid("layer_types", `${nLayers} of ${known.join(" and ")}`);
    return kinds.map((kind) => kind === known[1]);
  }

  /** Whether each layer attends in a window; without layer_types, every sliding_window_pattern-th layer is global. */
  localLayers(nLayers: number): boolean[] {
    return this.layerTypes(nLayers) ?? allButEvery(this.count("sliding_window_pattern", 1), nLayers, this.family.full_first);
  }

  /** Return the RoPE settings: rope_parameters, or the several keys of older configs. */
  rope(core: Core, trained: number): Record<string, unknown> {
    const { family } = this;
    let given = this.given.rope_parameters || this.given.rope_scaling || family.defaults.rope_parameters || {};
    if (family.rope_local && isObject(given)) given = given.full_attention ?? ("sliding_attention" in given ? {} : given);
    if (!isObject(given) || Object.values(given).some(isObject)) throw new WhetError(`${this.where}: rope_parameters is ${show(given)}, expected one object for all layers.`);
    const scaling: Record<string, unknown> = Object.fromEntries(Object.entries(given).filter(([key, value]) => value !== null && !family.rope_others.includes(key)));
    const theta = this.layerThetas(this.size("n_layers")).find(Boolean);
    if (theta !== undefined) scaling.rope_theta = theta;
    let kind = (scaling.rope_type ??= scaling.type ?? "default");
    if (kind === "su" || (kind === "yarn" && this.given.model_type === "phi3")) kind = scaling.rope_type = "longrope";
    const aliases = { rope_theta: ["rope_theta", "rotary_emb_base"], partial_rotary_factor: family.partial_rotary ? ["partial_rotary_factor", "rotary_pct"] : [] };
    for (const [key, names] of Object.entries(aliases)) {
      const found = names.map((name) => this.get(name)).find((value) => (value ?? null) !== null);
      if (found !== undefined) scaling[key] ??= found;
    }
    if (!family.partial_rotary && kind !== "proportional") {
      const partial = scaling.partial_rotary_factor ?? 1;
      delete scaling.partial_rotary_factor;
      if (partial !== 1 && kind !== "default") {
        throw new WhetError(`${this.where}: partial_rotary_factor is ${show(partial)} with rope_type ${show(kind)}, but ${this.given.model_type} rotates whole heads. Remove it.`);
      }
    }
    const { alpha } = scaling;
    if (family.rope_alpha && kind === "dynamic" && alpha) return { rope_theta: this.stretched(core, scaling.rope_theta ?? 10000, alpha) };
    const original = "original_max_position_embeddings";
    if (kind === "llama3" || kind === "yarn" || kind === "longrope") {
      scaling[original] = this.get(original) ?? scaling[original] ?? trained;
      if (kind !== "llama3" && typeof scaling[original] === "number" && scaling[original] > 0) scaling.factor ??= trained / scaling[original];
    } else if (kind === "dynamic") scaling[original] = trained;
    else delete scaling[original];
    return scaling;
  }

  /** Return theta alpha^(d / (d - 2)) for heads of d elements. */
  private stretched(core: Core, theta: unknown, alpha: unknown): number {
    const d = this.size("head_dim", Math.trunc(this.size("hidden_dim") / this.size("n_heads")));
    const isFactor = (value: unknown): value is number => typeof value === "number" && value > 0 && value < 1e12;
    if (!isFactor(theta) || !isFactor(alpha) || d < 3) throw this.invalid("rope_parameters", "rope_theta and alpha above 0, and heads of at least 4 elements");
    return theta * core.call("power", alpha, d / (d - 2));
  }
}

const isCount = (value: unknown, least: number): value is number => Number.isInteger(value) && (value as number) >= least;

/**
 * Return the engine's config of a model.
 *
 * @param length context length in tokens, for which frequencies are computed. Default: as trained.
 * @param tiedHead whether the head is the embedding. Default: tie_word_embeddings.
 */
export function modelConfig(core: Core, given: HfConfig, where: string, length?: number, tiedHead?: boolean): ModelConfig {
  const family = familyOf(given, where);
  const options = new Options(given, family, where);
  options.rejectUnsupported();
  const [nLayers, nHeads, hiddenDim] = ["n_layers", "n_heads", "hidden_dim"].map((name) => options.size(name));
  const nKvHeads = options.size("n_kv_heads", nHeads);
  const headDim = options.size("head_dim", Math.trunc(hiddenDim / nHeads));
  const isGiven = "head_dim" in family.keys && (options.get("head_dim") ?? null) !== null;
  if (!isGiven && hiddenDim % nHeads !== 0) throw options.invalid("hidden_dim", `a multiple of ${family.keys.n_heads}=${nHeads}`);
  if (nHeads % nKvHeads !== 0) throw options.invalid("n_heads", `a multiple of ${family.keys.n_kv_heads}=${nKvHeads}`);
  const trained = options.size("max_position");
  const maxPosition = length ?? trained;
  const experts = options.experts(nLayers);
  const layers = options.layerSizes(nLayers);
  if ("positions" in HF_MODULES[family.name] && maxPosition > trained) throw new WhetError(`${where}: contextLength is ${maxPosition}, expected at most ${trained}, the model's learned positions.`);
  let attentionScale = options.get("scale_attn_weights") === false ? 1 : 1 / Math.sqrt(headDim);
  if ("query_pre_attn_scalar" in family.defaults) attentionScale = core.call("power", options.number("query_pre_attn_scalar"), -0.5);
  return {
    ...PLAIN,
    nLayers, nHeads, nKvHeads, headDim, hiddenDim, maxPosition,
    ffnDim: options.ffnDim(hiddenDim),
    vocabSize: options.size("vocab_size"),
    normEps: options.number("norm_eps"),
    windows: options.windows(nLayers, maxPosition),
    attentionScale: options.scale("attention_scale", attentionScale),
    attentionSoftcap: options.softcap("attention_softcap"),
    embeddingScale: options.scale("embedding_scale", family.root_of_embedding ? Math.sqrt(hiddenDim) : 1),
    residualScale: options.scale("residual_scale"),
    logitsScale: 1 / options.scale("logits_divisor"),
    logitsSoftcap: options.softcap("logits_softcap"),
    learnedPositions: "positions" in HF_MODULES[family.name] ? trained : 0,
    activation: options.activation(),
    tiedHead: tiedHead ?? options.tiedHead(),
    ropeLayers: options.ropeLayers(nLayers),
    ...options.queryScale(),
    ...options.mixers(nLayers),
    ...readRotary(core, options, headDim, maxPosition, trained),
    ...readLocalRotary(core, options, nLayers, layers.localHeadDim || headDim, maxPosition),
    ...layers,
    ...settingsOf(family, (option) => options.flag(option), experts.nExperts),
    ...experts,
  };
}

function readRotary(core: Core, options: Options, headDim: number, length: number, trained: number): Partial<ModelConfig> {
  const { rope } = options.family;
  if (!options.rotates()) return {};
  const isScaled = rope !== "gptj";
  const found = ropeFrequencies(core, headDim, isScaled ? undefined : options.count("rotary_dim", 2), length, isScaled ? options.rope(core, trained) : {}, options.where);
  return { rotaryDim: 2 * found.invFreq.length, isNeox: rope === "neox", ...found };
}

/** Return the frequencies of layers with their own RoPE base. */
function readLocalRotary(core: Core, options: Options, nLayers: number, headDim: number, length: number): Partial<ModelConfig> {
  const thetas = options.layerThetas(nLayers);
  const other = [...new Set(thetas.filter(Boolean))][1];
  if (other !== undefined) {
    const scaling: Record<string, unknown> = { ...options.rope(core, options.size("max_position")), rope_theta: other };
    if (scaling.rope_type !== "default") throw options.invalid("layer_rope_theta", `one number other than 0, with rope_type ${show(scaling.rope_type)}`);
    return { localLayers: thetas.map((theta) => theta === other), localInvFreq: ropeFrequencies(core, headDim, undefined, length, scaling, options.where).invFreq };
  }
  if (!options.family.rope_local) return {};
  const given = options.get("rope_parameters");
  const theta = options.get("rope_local_base_freq") ?? options.rope(core, options.size("max_position")).rope_theta;
  const local = (isObject(given) && given.sliding_attention) || { rope_theta: theta };
  if (!isObject(local) || (local.rope_type ?? "default") !== "default") throw options.invalid("rope_parameters", "sliding_attention with the default rope_type");
  const localLayers = options.localLayers(nLayers);
  if (!localLayers.includes(true)) return {};
  return { localLayers, localInvFreq: ropeFrequencies(core, headDim, undefined, length, { rope_theta: local.rope_theta }, options.where).invFreq };
}
