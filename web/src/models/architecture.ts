/** Model architecture: sizes and switches, and the shapes of its weights. */
import { encode } from "../core/fields.js";
import { families, modelFields, parts as PARTS } from "../facts.js";

export interface ModelConfig {
  nLayers: number;
  nHeads: number;
  nKvHeads: number;
  headDim: number;
  hiddenDim: number;
  ffnDim: number;
  vocabSize: number;
  maxPosition: number;
  norm: "rms" | "layer";
  normEps: number;
  rotaryDim: number;
  isNeox: boolean;
  invFreq: number[];
  attentionFactor: number;
  learnedPositions: number;
  parallelResidual: boolean;
  sharedNorm: boolean;
  preNorm: boolean;
  postNorm: boolean;
  qkNorm: boolean;
  qkNormWhole: boolean;
  qkNormRotated: boolean;
  /** Queries are multiplied by 1 + queryLogScale log(1 + floor(position / queryScaleLength)). */
  queryLogScale: number;
  queryScaleLength: number;
  /** Whether each head has a logit without a value in its softmax. */
  sinks: boolean;
  activation: "silu" | "gelu" | "gelu_tanh" | "relu2" | "clamped_swiglu";
  gated: boolean;
  windows: number[];
  attentionScale: number;
  attentionSoftcap: number;
  /** Per layer: whether RoPE applies; empty: to all. */
  ropeLayers: boolean[];
  /** Per layer: whether RoPE uses localInvFreq; empty: in none. */
  localLayers: boolean[];
  localInvFreq: number[];
  /** Per layer: width of the MLP, 0: none; empty: ffnDim in all. */
  ffnDims: readonly number[];
  /** Head size of layers that rotate by localInvFreq; 0: headDim. */
  localHeadDim: number;
  /** Number of the last layers, which read the keys and values of an earlier layer. */
  nSharedKvLayers: number;
  /** Numbers of a token's input to each layer, from a second embedding; 0: none. */
  layerInputDim: number;
  /** Whether the output of each layer is multiplied by a number. */
  layerScale: boolean;
  vNorm: boolean;
  /** Whether every query head is followed by a gate of the head's output. */
  outputGate: boolean;
  /** Per layer: what mixes the tokens; empty: attention in all. */
  mixers: ("attention" | "conv" | "delta" | "mamba" | "none")[];
  /** Taps of short convolutions. */
  convLength: number;
  /** Value and key heads of the gated delta rule, or of Mamba-2, and their sizes. */
  nDeltaHeads: number;
  nDeltaKeyHeads: number;
  deltaDim: number;
  deltaKeyDim: number;
  /** Whether value head h reads key head h % nDeltaKeyHeads. */
  deltaTiled: boolean;
  /** Lower bound of the steps of Mamba-2. */
  deltaStepMin: number;
  /** Mixture of experts in place of the MLP of some layers (moeLayers; empty: of all, if there are experts). */
  nExperts: number;
  nUsedExperts: number;
  expertDim: number;
  sharedDim: number;
  moeLayers: readonly boolean[];
  sharedGate: boolean;
  router: "softmax" | "sigmoid";
  routerNormalised: boolean;
  routerEps: number;
  routerScale: number;
  routerCorrection: boolean;
  routerBias: boolean;
  expertsBias: boolean;
  embeddingScale: number;
  residualScale: number;
  logitsScale: number;
  logitsSoftcap: number;
  tiedHead: boolean;
  qkvBias: boolean;
  oBias: boolean;
  mlpBias: boolean;
  headBias: boolean;
}

/** Flags that only select slots. */
type SlotFlag = "routerCorrection" | "routerBias" | "expertsBias" | "tiedHead" | "qkvBias" | "oBias" | "mlpBias" | "headBias";

export interface Family {
  name: string;
  keys: Record<string, string>;
  settings: Record<string, unknown>;
  defaults: Record<string, unknown>;
  window: "none" | "all" | "some" | "pattern";
  rope: "neox" | "pairs" | "gptj" | "none";
  partial_rotary: boolean;
  rope_off: boolean;
  rope_local: boolean;
  root_of_embedding: boolean;
  rope_option: string;
  rope_windowed: boolean;
  rope_others: readonly string[];
  rope_alpha: boolean;
  query_scale: boolean;
  rope_by_layer: boolean;
  full_first: boolean;
  ffn_adjusted: boolean;
  mixer: "" | "conv" | "delta" | "mamba";
  one_only: boolean;
  older: Record<string, string>;
  plain: Record<string, unknown[]>;
  file_prefix: string;
  with_experts: string;
}

/** Return the objects of facts.ts, which are differences from the first, or whole in a list; null removes an entry. `hasName`: adds the name of each. */
export function merge<T extends object>(differences: Record<string, object>, hasName = false): Record<string, T> {
  const [base] = Object.values(differences) as Entries[];
  return Object.fromEntries(Object.entries(differences).map(([name, own]) => [name, { ...(Array.isArray(own) ? own[0] : merged(base, own)), ...(hasName && { name }) } as T]));
}

type Entries = Record<string, any>;

function merged(base: Entries, own: Entries): Entries {
  const found: Entries = {};
  for (const [name, value] of Object.entries({ ...base, ...own })) {
    if (value !== null) found[name] = /^(keys|settings|defaults|modules)$/.test(name) ? merged(base[name], value) : value;
  }
  return found;
}

export const FAMILIES: Record<string, Family> = /* @__PURE__ */ merge(families, true);

/** Return the family of a model with experts, or without. */
export function withExperts(family: Family, hasExperts: boolean): Family {
  const { with_experts: other, defaults, rope_option, mixer } = family;
  return other !== "" && hasExperts ? { ...FAMILIES[other], defaults, rope_option, mixer } : family;
}

export const toCamel = (name: string) => name.replace(/_(\w)/g, (_, letter: string) => letter.toUpperCase());

type Sizes = "nLayers" | "nHeads" | "nKvHeads" | "headDim" | "hiddenDim" | "ffnDim" | "vocabSize" | "maxPosition" | "normEps" | "learnedPositions" | "activation" | "windows" | "ropeLayers" | "tiedHead";
type Factors = "attentionScale" | "attentionSoftcap" | "embeddingScale" | "residualScale" | "logitsScale" | "logitsSoftcap";

/** Fields of a family without settings: attention without rotation in all layers. */
export const PLAIN: Omit<ModelConfig, Sizes | Factors> = {
  norm: "rms", preNorm: true, postNorm: false, qkNorm: false, qkNormWhole: false, qkNormRotated: false, sinks: false, outputGate: false,
  parallelResidual: false, sharedNorm: false, gated: true, qkvBias: false, oBias: false, mlpBias: false, headBias: false,
  rotaryDim: 0, isNeox: true, invFreq: [], attentionFactor: 1, localLayers: [], localInvFreq: [], queryLogScale: 0, queryScaleLength: 1,
  localHeadDim: 0, nSharedKvLayers: 0, ffnDims: [], layerInputDim: 0, layerScale: false, vNorm: false,
  mixers: [], convLength: 0, nDeltaHeads: 0, nDeltaKeyHeads: 0, deltaDim: 0, deltaKeyDim: 0, deltaTiled: false, deltaStepMin: 0,
  nExperts: 0, nUsedExperts: 0, expertDim: 0, sharedDim: 0, moeLayers: [], sharedGate: false, router: "softmax", routerNormalised: false, routerEps: 0, routerScale: 1, routerCorrection: false, routerBias: false, expertsBias: false,
};

/** Flags of n layers: false for one of each `interval`, the last or the first. */
export const allButEvery = (interval: number, n: number, isFirst = false) => Array.from({ length: n }, (_, i) => (i + (isFirst ? 0 : 1)) % interval !== 0);

/** Return a family's settings for a config; `flag` returns the options that "@name" refers to. Routers' need experts. */
export const settingsOf = (family: Family, flag: (option: string) => boolean, nExperts = 0): Record<string, unknown> =>
  Object.fromEntries(Object.entries(family.settings).filter(([name]) => nExperts > 0 || !/^(router|shared_gate|experts_)/.test(name)).map(([name, value]) => [toCamel(name), typeof value === "string" && value.startsWith("@") ? flag(value.slice(1)) : value]));

/** Return the numbers of a token in a layer with the gated delta rule, or with Mamba-2: its channels (q, k, v), and its values. */
export function deltaSizes(c: ModelConfig): [channels: number, values: number] {
  const values = c.nDeltaHeads * c.deltaDim;
  return [2 * c.nDeltaKeyHeads * c.deltaKeyDim + values, values];
}

/** Whether a layer has a mixture of experts. */
export const isMixture = (c: ModelConfig, layer: number) => c.nExperts > 0 && (c.moeLayers[layer] ?? true);

const isLocal = (c: ModelConfig, layer: number) => c.localLayers[layer] ?? false;

/** Whether a layer computes keys and values; the others read keys and values of an earlier layer with the same rotations. */
export const hasOwnKv = (c: ModelConfig, layer: number) => layer < c.nLayers - c.nSharedKvLayers;

const headDimOf = (c: ModelConfig, layer: number) => (isLocal(c, layer) && c.localHeadDim) || c.headDim;

/** Return the rows of a layer's queries (with gates), keys and values. */
function attentionRows(c: ModelConfig, layer: number): Record<"q" | "k" | "v", number> {
  const kv = hasOwnKv(c, layer) ? c.nKvHeads * headDimOf(c, layer) : 0;
  return { q: (c.outputGate ? 2 : 1) * c.nHeads * headDimOf(c, layer), k: kv, v: kv };
}

/** Slot of the second embedding, whose rows stay in the file: see TokenRows. */
export const TABLE = "layer_embedding";

/** Return the shape of every weight by name, as in whet.models.architecture. */
export function slots(c: ModelConfig): Map<string, number[]> {
  const [channels, values] = deltaSizes(c);
  const found = new Map<string, number[]>([["embedding", [c.vocabSize, c.hiddenDim]]]);
  if (c.learnedPositions > 0) found.set("positions", [c.learnedPositions, c.hiddenDim]);
  const parts = c.norm === "layer" ? ["weight", "bias"] : ["weight"];
  type Shape = [string, number, number, boolean];
  const matrices: Record<ModelConfig["mixers"][number], Shape[]> = {
    attention: [], // of different sizes
    conv: [["conv_in", 3 * c.hiddenDim, c.hiddenDim, false], ["conv_out", c.hiddenDim, c.hiddenDim, false]],
    delta: [["delta_in", channels + values + 2 * c.nDeltaHeads, c.hiddenDim, false], ["delta_out", c.hiddenDim, values, false]],
    none: [],
    mamba: [["delta_in", channels + values + c.nDeltaHeads, c.hiddenDim, false], ["delta_out", c.hiddenDim, values, false]],
  };
  const [up, perDim] = c.gated ? ["gate_up", 2] : ["up", 1];
  const mlp = (width: number): Shape[] => (width === 0 ? [] : [[up, perDim * width, c.hiddenDim, c.mlpBias], ["down", c.hiddenDim, width, c.mlpBias]]);
  const experts: Shape[] = [
    ["router", c.nExperts, c.hiddenDim, c.routerBias],
    [`experts_${up}`, c.nExperts * perDim * c.expertDim, c.hiddenDim, c.expertsBias],
    ["experts_down", c.nExperts * c.hiddenDim, c.expertDim, c.expertsBias],
    ...(c.sharedGate ? [["shared_router", 1, c.hiddenDim, false] as Shape] : []),
    ...mlp(c.sharedDim),
  ];
  if (c.layerInputDim > 0) {
    const nInputs = c.nLayers * c.layerInputDim;
    found.set(TABLE, [c.vocabSize, nInputs]).set("layer_inputs", [nInputs, c.hiddenDim]).set("layer_inputs_norm.weight", [c.layerInputDim]);
  }
  for (let i = 0; i < c.nLayers; ++i) {
    const mixer = c.mixers[i] ?? "attention";
    const [dim, own] = [headDimOf(c, i), attentionRows(c, i)];
    matrices.attention = [["qkv", own.q + own.k + own.v, c.hiddenDim, c.qkvBias], ["o", c.hiddenDim, c.nHeads * dim, c.oBias]];
    const isMoe = isMixture(c, i);
    const width = c.ffnDims[i] ?? c.ffnDim;
    const norms = [...(c.sharedNorm ? ["norm1"] : c.preNorm ? ["norm1", "norm2"] : []), ...(c.postNorm ? ["post_norm1", "post_norm2"] : [])];
    for (const norm of norms) {
      if (norm.endsWith("1") ? mixer === "none" : !isMoe && width === 0) continue;
      for (const part of parts) found.set(`layers.${i}.${norm}.${part}`, [c.hiddenDim]);
    }
    const normed = c.qkNormWhole ? [c.nHeads, c.nKvHeads] : [1, 1];
    if (mixer !== "attention" && mixer !== "none") found.set(`layers.${i}.conv`, [c.convLength, mixer === "conv" ? c.hiddenDim : channels]);
    else if (c.qkNorm && mixer === "attention") for (const [j, which] of (["q", "k"] as const).entries()) if (own[which] > 0) found.set(`layers.${i}.${which}_norm.weight`, [normed[j] * dim]);
    const vectors: Record<string, Record<string, number>> = {
      delta: { decay: c.nDeltaHeads, dt_bias: c.nDeltaHeads, "delta_norm.weight": c.deltaDim },
      mamba: { decay: c.nDeltaHeads, dt_bias: c.nDeltaHeads, "delta_norm.weight": values, conv_bias: channels, skip: c.nDeltaHeads },
    };
    for (const [name, n] of Object.entries(vectors[mixer] ?? {})) found.set(`layers.${i}.${name}`, [n]);
    if (c.layerScale) found.set(`layers.${i}.scale`, [1]);
    if (c.layerInputDim > 0) {
      found.set(`layers.${i}.input_gate`, [c.layerInputDim, c.hiddenDim]).set(`layers.${i}.input_out`, [c.hiddenDim, c.layerInputDim]);
      found.set(`layers.${i}.input_norm.weight`, [c.hiddenDim]);
    }
    if (c.sinks && mixer === "attention") found.set(`layers.${i}.sinks`, [c.nHeads]);
    if (isMoe && c.routerCorrection) found.set(`layers.${i}.router_correction`, [c.nExperts]);
    for (const [name, n, k, biased] of [...matrices[mixer], ...(isMoe ? experts : mlp(width))]) {
      found.set(`layers.${i}.${name}`, [n, k]);
      if (biased) found.set(`layers.${i}.${name}.bias`, [n]);
    }
  }
  for (const part of parts) found.set(`final_norm.${part}`, [c.hiddenDim]);
  if (!c.tiedHead) found.set("head", [c.vocabSize, c.hiddenDim]);
  if (c.headBias) found.set("head.bias", [c.vocabSize]);
  return found;
}

/** Return a module's rows in a layer's slot: a part of PARTS; "": all rows. Experts: the first row, and the rows of all. */
export function moduleRows(c: ModelConfig, layer: number, part: string, rows: number, isOfExperts = false): [first: number, count: number] {
  if (part === "") return [0, rows];
  if (isOfExperts) return [part === "up" ? c.expertDim : 0, rows / 2];
  const [qkv, z] = deltaSizes(c);
  const sizes: Record<string, number> = { ...attentionRows(c, layer), gate: rows / 2, up: rows / 2, qkv, z, b: c.nDeltaHeads, a: c.nDeltaHeads };
  const parts: readonly string[] = Object.values(PARTS).find((names) => (names as readonly string[]).includes(part))!;
  return [parts.slice(0, parts.indexOf(part)).reduce((sum, name) => sum + sizes[name], 0), sizes[part]];
}

/** Encode a config for the core. A field of ModelConfig that fields.def lacks makes every call a type error. */
export const encodeConfig = (c: ModelConfig & Record<Exclude<keyof ModelConfig, (typeof modelFields)[number] | SlotFlag>, never>) => encode(modelFields, c);
