/** UTF-8 decoding of one or many strings. */
const DECODER = new TextDecoder("utf-8", { ignoreBOM: true });

/** Decode UTF-8, with U+FFFD for invalid bytes, also from shared memory. */
export const decode = (bytes: Uint8Array) => DECODER.decode(bytes.slice());

/** Decode length-prefixed strings. They are decoded in one call and split by UTF-16 lengths: 100,000 calls took a large part
 * of the load time of a 100 MB model. */
export function readTexts(header: Uint8Array, offset: number, count: number): string[] {
  const view = new DataView(header.buffer, header.byteOffset, header.byteLength);
  const starts: number[] = [];
  const sizes: number[] = [];
  let total = 0;
  for (let i = 0, at = offset; i < count; ++i) {
    const n = Number(view.getBigUint64(at, true));
    starts.push(at + 8);
    sizes.push(n);
    total += n;
    at += 8 + n;
  }
  const joined = new Uint8Array(total);
  const ends: number[] = [];
  let [at, units] = [0, 0];
  let isSplittable = true; // no string begins within a character
  for (let i = 0; i < count; ++i) {
    joined.set(header.subarray(starts[i], starts[i] + sizes[i]), at);
    if (sizes[i] > 0 && (joined[at] & 0xc0) === 0x80) isSplittable = false;
    for (const end = at + sizes[i]; at < end; ++at) {
      if ((joined[at] & 0xc0) !== 0x80) units += joined[at] >= 0xf0 ? 2 : 1;
    }
    ends.push(units);
  }
  const all = isSplittable ? decodeValid(joined) : undefined;
  if (all === undefined) return starts.map((start, i) => decode(header.subarray(start, start + sizes[i])));
  return ends.map((end, i) => all.slice(i === 0 ? 0 : ends[i - 1], end));
}

/** Decode bytes, or return undefined if they are not valid UTF-8. */
function decodeValid(bytes: Uint8Array): string | undefined {
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
  } catch {
    return undefined;
  }
}
