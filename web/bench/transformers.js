// transformers.js on the plain WebAssembly build of ONNX Runtime, its fastest CPU backend; greedy.
import { AutoModelForCausalLM, env, Tensor } from "/peers/@huggingface/transformers/dist/transformers.min.js";

let model;

const FILES = { fp32: "model", q8: "model_quantized" };

export async function load({ folder, model: name, dtype, threads }) {
  const ort = "/peers/onnxruntime-web/dist/ort-wasm-simd-threaded";
  Object.assign(env.backends.onnx.wasm, { numThreads: threads, wasmPaths: { mjs: `${ort}.mjs`, wasm: `${ort}.wasm` } });
  const files = new Map();
  for (const file of ["config.json", `onnx/${FILES[dtype]}.onnx`]) {
    const path = `${folder}${name}/${file}`;
    files.set(path, await (await fetch(path)).blob());
  }
  const match = async (path) => (files.has(path) ? new Response(files.get(path)) : undefined);
  Object.assign(env, { allowRemoteModels: false, allowLocalModels: true, localModelPath: folder, useBrowserCache: false, useWasmCache: false });
  Object.assign(env, { useCustomCache: true, customCache: { match, put: async () => {} } });
  const began = performance.now();
  model = await AutoModelForCausalLM.from_pretrained(name, { dtype, device: "wasm" });
  return (performance.now() - began) / 1000;
}

export async function generate({ ids, n }) {
  const input_ids = new Tensor("int64", BigInt64Array.from(ids.map(BigInt)), [1, ids.length]);
  const attention_mask = new Tensor("int64", new BigInt64Array(ids.length).fill(1n), [1, ids.length]);
  const times = [];
  const streamer = { put: () => times.push(performance.now()), end() {} }; // called with the prompt, then with each token
  const began = performance.now();
  const output = await model.generate({ input_ids, attention_mask, max_new_tokens: n, min_new_tokens: n, do_sample: false, streamer });
  const tokens = Array.from(output.data, Number).slice(ids.length).map((token) => ({ token }));
  return { tokens, prefill: (times[1] - began) / 1000, decode: (times[times.length - 1] - times[1]) / 1000 };
}

export const close = () => model.dispose();
