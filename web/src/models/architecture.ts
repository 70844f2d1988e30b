/** Model architecture: sizes and switches, and the shapes of its weights. */
import { encode } from "../core/fields.js";
import { families, modelFields } from "../facts.js";

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
  activation: "silu" | "gelu" | "gelu_tanh" | "relu2";
  gated: boolean;
  windows: number[];
  attentionScale: number;
  attentionSoftcap: number;
  /** Per layer: whether RoPE applies; empty: to all. */
  ropeLayers: boolean[];
  /** Per layer: whether RoPE uses localInvFreq; empty: in none. */
  localLayers: boolean[];
  localInvFreq: number[];
  /** Whether every query head is followed by a gate of the head's output. */
  outputGate: boolean;
  /** Per layer: what mixes the tokens; empty: attention in all. */
  mixers: ("attention" | "conv" | "delta")[];
  /** Taps of short convolutions. */
  convLength: number;
  /** Value and key heads of the gated delta rule, and their sizes. */
  nDeltaHeads: number;
  nDeltaKeyHeads: number;
  deltaDim: number;
  deltaKeyDim: number;
  /** Whether value head h reads key head h % nDeltaKeyHeads. */
  deltaTiled: boolean;
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
type SlotFlag = "tiedHead" | "qkvBias" | "oBias" | "mlpBias" | "headBias";

export interface Family {
  name: string;
  keys: Record<string, string>;
  settings: Record<string, unknown>;
  defaults: Record<string, unknown>;
  /** GGUF tensor names by slot. */
  modules: Readonly<Record<string, string>>;
  /** Slots whose GGUF tensors are (inputs, outputs). */
  transposed: readonly string[];
  gguf: { architecture: string; interleaved?: boolean; scale_by_hidden?: number; sliding_window?: number } | null;
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
}

export const FAMILIES: Record<string, Family> = families;

const toCamel = (name: string) => name.replace(/_(\w)/g, (_, letter: string) => letter.toUpperCase());

/** Switches of a family without settings. */
export const PLAIN_SWITCHES = {
  norm: "rms", preNorm: true, postNorm: false, qkNorm: false, qkNormWhole: false, qkNormRotated: false, sinks: false, outputGate: false,
  parallelResidual: false, sharedNorm: false, gated: true,
  qkvBias: false, oBias: false, mlpBias: false, headBias: false,
} as const;
/** Flags of n layers: false for one of each `interval`, the last or the first. */
export const allButEvery = (interval: number, n: number, isFirst = false) => Array.from({ length: n }, (_, i) => (i + (isFirst ? 0 : 1)) % interval !== 0);
export const ALL_ATTENTION = { mixers: [], convLength: 0, nDeltaHeads: 0, nDeltaKeyHeads: 0, deltaDim: 0, deltaKeyDim: 0, deltaTiled: false };
export type Mixers = Pick<ModelConfig, keyof typeof ALL_ATTENTION>;
export const NO_QUERY_SCALE = { queryLogScale: 0, queryScaleLength: 1 };
export const NO_ROTARY = { rotaryDim: 0, isNeox: true, invFreq: [], attentionFactor: 1 };

/** Return a family's settings for a config; `flag` returns the options that "@name" refers to. */
export const settingsOf = (family: Family, flag: (option: string) => boolean): Record<string, unknown> =>
  Object.fromEntries(Object.entries(family.settings).map(([name, value]) => [toCamel(name), typeof value === "string" && value.startsWith("@") ? flag(value.slice(1)) : value]));

/** Return the shape of every weight by name, as in whet.models.architecture. */
export function slots(c: ModelConfig): Map<string, number[]> {
  const q = c.nHeads * c.headDim;
  const found = new Map<string, number[]>([["embedding", [c.vocabSize, c.hiddenDim]]]);
  if (c.learnedPositions > 0) found.set("positions", [c.learnedPositions, c.hiddenDim]);
  const parts = c.norm === "layer" ? ["weight", "bias"] : ["weight"];
  type Shape = [string, number, number, boolean];
  const attention: Shape[] = [["qkv", q + 2 * c.nKvHeads * c.headDim, c.hiddenDim, c.qkvBias], ["o", c.hiddenDim, q, c.oBias]];
  const convolution: Shape[] = [["conv_in", 3 * c.hiddenDim, c.hiddenDim, false], ["conv_out", c.hiddenDim, c.hiddenDim, false]];
  const mlp: Shape[] = [
    [c.gated ? "gate_up" : "up", (c.gated ? 2 : 1) * c.ffnDim, c.hiddenDim, c.mlpBias],
    ["down", c.hiddenDim, c.ffnDim, c.mlpBias],
  ];
  for (let i = 0; i < c.nLayers; ++i) {
    const norms = [...(c.sharedNorm ? ["norm1"] : c.preNorm ? ["norm1", "norm2"] : []), ...(c.postNorm ? ["post_norm1", "post_norm2"] : [])];
    for (const norm of norms) {
      for (const part of parts) found.set(`layers.${i}.${norm}.${part}`, [c.hiddenDim]);
    }
    const normed = c.qkNormWhole ? [c.nHeads, c.nKvHeads] : [1, 1];
    const isConv = c.mixers[i] === "conv";
    if (isConv) found.set(`layers.${i}.conv`, [c.convLength, c.hiddenDim]);
    if (c.qkNorm && !isConv) for (const [j, which] of ["q", "k"].entries()) found.set(`layers.${i}.${which}_norm.weight`, [normed[j] * c.headDim]);
    if (c.sinks && !isConv) found.set(`layers.${i}.sinks`, [c.nHeads]);
    for (const [name, n, k, biased] of [...(isConv ? convolution : attention), ...mlp]) {
      found.set(`layers.${i}.${name}`, [n, k]);
      if (biased) found.set(`layers.${i}.${name}.bias`, [n]);
    }
  }
  for (const part of parts) found.set(`final_norm.${part}`, [c.hiddenDim]);
  if (!c.tiedHead) found.set("head", [c.vocabSize, c.hiddenDim]);
  if (c.headBias) found.set("head.bias", [c.vocabSize]);
  return found;
}

/** Return a module's rows in a slot: "q", "k" or "v" of qkv, "gate" or "up" of gate_up; "": all rows. */
export function moduleRows(c: ModelConfig, part: string, rows: number): [first: number, count: number] {
  const q = c.nHeads * c.headDim;
  const kv = c.nKvHeads * c.headDim;
  const parts: Record<string, [number, number]> = {
    "": [0, rows],
    q: [0, q],
    k: [q, kv],
    v: [q + kv, kv],
    gate: [0, c.ffnDim],
    up: [c.ffnDim, c.ffnDim],
  };
  return parts[part];
}

/** Encode a config for the core. A field of ModelConfig that fields.def lacks makes every call a type error. */
export const encodeConfig = (c: ModelConfig & Record<Exclude<keyof ModelConfig, (typeof modelFields)[number] | SlotFlag>, never>) => encode(modelFields, c);
