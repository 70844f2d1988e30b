/** Return a stream's tokens, the seconds to the first token and from the first to the last. */
export async function timed(stream, read) {
  const tokens = [];
  const began = performance.now();
  let first = 0;
  let last = 0;
  for await (const each of stream) {
    const token = read(each);
    if (token === undefined) continue;
    last = performance.now();
    if (tokens.length === 0) first = last;
    tokens.push(token);
  }
  return { tokens, prefill: (first - began) / 1000, decode: (last - first) / 1000 };
}
