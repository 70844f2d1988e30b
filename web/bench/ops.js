// The kernels behind Ops: on arrays that stay in the module's memory, and through the public calls, which copy them.
import { Ops } from "/whet/ops.js";

const BATCH_S = 0.02; // the clock of an isolated page steps by 5 us
let measured;

const CALLS = {
  gemv: (ops, [a, x]) => ({ results: x.length, core: ([matrix, vector], out) => ["op_gemv", matrix, a.length / x.length, x.length, vector, out], call: () => ops.gemv(a, x) }),
  rms_norm: (ops, [x, weight]) => ({ results: x.length, core: ([at, by], out) => ["op_rms_norm", at, 0, by, 1, x.length, 1e-6, out], call: () => ops.rmsNorm(x, weight) }),
  decode_attention: (ops, [q, k, v]) => {
    const [headDim, keys] = [q.length, k.length / q.length];
    return {
      results: headDim,
      core: (at, out) => ["op_decode_attention", ...at, 0, keys, 1, 1, headDim, 1 / Math.sqrt(headDim), out],
      call: () => ops.decodeAttention(q, k, v, { heads: 1, headDim }),
    };
  },
};

/** Keeps the inputs, float32 one after the other in a file, for calls of a kernel. */
export async function prepare({ name, url, lengths, isCopied }) {
  const ops = await Ops.load();
  const bytes = await (await fetch(url)).arrayBuffer();
  let at = 0;
  const arrays = lengths.map((n) => new Float32Array(bytes, 4 * at, ((at += n), n)));
  const { results, core, call } = CALLS[name](ops, arrays);
  if (isCopied) return void (measured = { run: call, read: call });
  const places = [...arrays, new Float32Array(results)].map((array) => {
    const place = ops.core.allocate(array.byteLength);
    ops.core.bytes(place, array.byteLength).set(new Uint8Array(array.buffer, array.byteOffset, array.byteLength));
    return place;
  });
  const out = places.pop();
  const given = core(places, out);
  measured = { run: () => ops.core.call(...given), read: () => (ops.core.call(...given), ops.core.floats(out, results)) };
}

/** The seconds of a call, over a batch, and its result. */
export function call() {
  const { run, read } = measured;
  for (let n = 1; ; n *= 2) {
    const began = performance.now();
    for (let i = 0; i < n; ++i) run();
    const seconds = (performance.now() - began) / 1000;
    if (seconds >= BATCH_S) return { seconds: seconds / n, values: Array.from(read()) };
  }
}
