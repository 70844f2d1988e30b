/** UTF-8 to texts, one or many at once. */
const DECODER = new TextDecoder("utf-8", { ignoreBOM: true });

/** A text, with U+FFFD where it is no UTF-8; from shared memory too. */
export const decode = (bytes: Uint8Array) => DECODER.decode(bytes.slice());

/** Texts with their lengths before them. They are decoded at once, and cut where a text has its UTF-16 units: calls for each
 * of 100,000 were a large part of loading a model of 100 MB. */
export function readTexts(head: Uint8Array, offset: number, count: number): string[] {
  const view = new DataView(head.buffer, head.byteOffset, head.byteLength);
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
  let areApart = true; // no text begins within a character
  for (let i = 0; i < count; ++i) {
    joined.set(head.subarray(starts[i], starts[i] + sizes[i]), at);
    if (sizes[i] > 0 && (joined[at] & 0xc0) === 0x80) areApart = false;
    for (const end = at + sizes[i]; at < end; ++at) {
      if ((joined[at] & 0xc0) !== 0x80) units += joined[at] >= 0xf0 ? 2 : 1;
    }
    ends.push(units);
  }
  const all = areApart ? decodeWhole(joined) : undefined;
  if (all === undefined) return starts.map((start, i) => decode(head.subarray(start, start + sizes[i])));
  return ends.map((end, i) => all.slice(i === 0 ? 0 : ends[i - 1], end));
}

/** The text of bytes that are UTF-8 throughout. */
function decodeWhole(bytes: Uint8Array): string | undefined {
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
  } catch {
    return undefined;
  }
}
