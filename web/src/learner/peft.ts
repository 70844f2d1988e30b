/** PEFT folders of adapters, with Whet's record of their base: read by whet.Engine, whet.Learner, `--adapter` and PEFT. */
import { adapters as RULES, learning } from "../facts.js";
import type { Saved } from "./protocol.js";

/** Return the files of the folder by name. */
export function peftFiles({ factors, targetModules, record }: Saved, alpha: number, model: string): Record<string, Uint8Array<ArrayBuffer>> {
  const [{ rank }] = factors.values();
  const tensors = new Map<string, [shape: number[], values: Float32Array]>();
  for (const [module, { a, b }] of factors) {
    tensors.set(`${RULES.prefix}${module}.lora_A.weight`, [[rank, a.length / rank], a]);
    tensors.set(`${RULES.prefix}${module}.lora_B.weight`, [[b.length / rank, rank], b]);
  }
  const config = { ...learning.peft, base_model_name_or_path: model, r: rank, lora_alpha: alpha, target_modules: targetModules };
  const json = (value: object) => new TextEncoder().encode(`${JSON.stringify(value, null, 2)}\n`);
  return { "adapter_config.json": json(config), "adapter_model.safetensors": writeSafetensors(tensors), "whet_base.json": json(record) };
}

/** Return a safetensors file of float32 tensors: the size of its header, the header, padded to 8 bytes, and the values. */
function writeSafetensors(tensors: ReadonlyMap<string, [shape: number[], values: Float32Array]>): Uint8Array<ArrayBuffer> {
  let end = 0;
  const header: Record<string, object> = { __metadata__: { format: "pt" } };
  for (const [name, [shape, { byteLength }]] of tensors) header[name] = { dtype: "F32", shape, data_offsets: [end, (end += byteLength)] };
  const text = new TextEncoder().encode(JSON.stringify(header));
  const begin = 8 + Math.ceil(text.length / 8) * 8;
  const file = new Uint8Array(begin + end).fill(0x20, 0, begin); // spaces
  new DataView(file.buffer).setBigUint64(0, BigInt(begin - 8), true);
  file.set(text, 8);
  let at = begin;
  for (const [, values] of tensors.values()) {
    file.set(new Uint8Array(values.buffer, values.byteOffset, values.byteLength), at);
    at += values.byteLength;
  }
  return file;
}
