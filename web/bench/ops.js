// Kernels behind Ops: on arrays in the module's memory, and through the public calls, which copy them.
import { Ops } from "/whet/ops.js";

const BATCH_S = 0.02; // the clock of an isolated page steps by 5 us
let measured;

const CALLS = {
  gemv: (ops, [a, x]) => ({ results: x.length, args: ([matrix, vector], y) => ({ a: matrix, m: a.length / x.length, n: x.length, x: vector, y }), call: () => ops.gemv(a, x) }),
  rms_norm: (ops, [x, weight]) => ({ results: x.length, args: ([at, by], out) => ({ x: at, residual: 0, weight: by, rows: 1, n: x.length, eps: 1e-6, out }), call: () => ops.rmsNorm(x, weight) }),
  decode_attention: (ops, [q, k, v]) => {
    const [headDim, keys] = [q.length, k.length / q.length];
    return {
      results: headDim,
      args: ([q, k, v], out) => ({ q, k, v, first: 0, nKeys: keys, nHeads: 1, nKvHeads: 1, headDim, scale: 1 / Math.sqrt(headDim), out }),
      call: () => ops.decodeAttention(q, k, v, { heads: 1, headDim }),
    };
  },
};

/** Prepare a kernel's inputs from a file of concatenated float32 arrays. */
export async function prepare({ name, url, lengths, isCopied }) {
  const ops = await Ops.load();
  const bytes = await (await fetch(url)).arrayBuffer();
  let at = 0;
  const arrays = lengths.map((n) => new Float32Array(bytes, 4 * at, ((at += n), n)));
  const { results, args, call } = CALLS[name](ops, arrays);
  if (isCopied) return void (measured = { run: call, read: call });
  const addresses = [...arrays, new Float32Array(results)].map((array) => {
    const address = ops.core.allocate(array.byteLength);
    ops.core.bytes(address, array.byteLength).set(new Uint8Array(array.buffer, array.byteOffset, array.byteLength));
    return address;
  });
  const out = addresses.pop();
  const [kernel, given] = [Ops.calls[`op_${name}`], args(addresses, out)];
  const run = () => kernel(ops.core, given);
  measured = { run, read: () => (run(), ops.core.floats(out, results)) };
}

/** Return the seconds per call, over a batch, and the result. */
export function call() {
  const { run, read } = measured;
  for (let n = 1; ; n *= 2) {
    const began = performance.now();
    for (let i = 0; i < n; ++i) run();
    const seconds = (performance.now() - began) / 1000;
    if (seconds >= BATCH_S) return { seconds: seconds / n, values: Array.from(read()) };
  }
}
