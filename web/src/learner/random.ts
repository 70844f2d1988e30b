/** NumPy's random numbers: SeedSequence (O'Neill 2015) and PCG64, so that a seed gives the adapters and samples of Python. */

const XSHIFT = 16;

/** Split integers of at most 64 bits into 32-bit words, at least one each, the lowest first. */
const wordsOf = (numbers: readonly bigint[]) => numbers.flatMap((x) => (x >> 32n === 0n ? [Number(x)] : [Number(x & 0xffffffffn), Number(x >> 32n)]));

/** Return SeedSequence(entropy).generate_state(n): 32-bit words. */
export function seedWords(entropy: readonly bigint[], n: number): number[] {
  const words = wordsOf(entropy);
  let constant = 0x43b0d7e5;
  const hash = (word: number) => {
    word ^= constant;
    constant = Math.imul(constant, 0x931e8875);
    word = Math.imul(word, constant);
    return word ^ (word >>> XSHIFT);
  };
  const mix = (x: number, y: number) => {
    const word = (Math.imul(0xca01f9dd, x) - Math.imul(0x4973f715, y)) | 0;
    return word ^ (word >>> XSHIFT);
  };
  const pool = Array.from({ length: 4 }, (_, i) => hash(words[i] ?? 0));
  for (let from = 0; from < 4; ++from) {
    for (let to = 0; to < 4; ++to) if (from !== to) pool[to] = mix(pool[to], hash(pool[from]));
  }
  for (const word of words.slice(4)) for (let to = 0; to < 4; ++to) pool[to] = mix(pool[to], hash(word));
  let multiplier = 0x8b51f9dd;
  return Array.from({ length: n }, (_, i) => {
    let word = pool[i % 4] ^ multiplier;
    multiplier = Math.imul(multiplier, 0x58f38ded);
    word = Math.imul(word, multiplier);
    return (word ^ (word >>> XSHIFT)) >>> 0;
  });
}

const [MULTIPLIER, MASK] = [0x2360ed051fc65da44385df649fccf645n, (1n << 128n) - 1n];

/** Return a function that draws as numpy.random.default_rng(seed).random() does: float64 in [0, 1). */
export function uniforms(seed: bigint): () => number {
  const [a, b, c, d] = Array.from(new BigUint64Array(Uint32Array.from(seedWords([seed], 8)).buffer));
  const increment = (((c << 64n) | d) << 1n) | 1n;
  const step = (state: bigint) => (state * MULTIPLIER + increment) & MASK;
  let state = step(step(0n) + ((a << 64n) | b));
  return () => {
    state = step(state);
    const [word, turn] = [(state >> 64n) ^ (state & 0xffffffffffffffffn), state >> 122n];
    return Number((((word >> turn) | (word << (64n - turn))) & 0xffffffffffffffffn) >> 11n) * 2 ** -53;
  };
}
