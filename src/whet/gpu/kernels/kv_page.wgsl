// A page of keys and values has, per KV head, the words of 64 keys, (KV_WORDS, 64), then those of 64 values,
// (64, KV_WORDS). A word is ELEMENTS numbers: a float32, or two bfloat16.
const HEAD_WORDS = 64u * KV_WORDS;

fn page_at(page: i32, kv_head: u32) -> u32 { return (u32(page) * N_KV_HEADS + kv_head) * 2u * HEAD_WORDS; }

fn bfloat16(value: f32) -> u32 {  // to nearest even
  let bits = bitcast<u32>(value);
  return (bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u;
}
fn pack(first: f32, second: f32) -> u32 {
  if (KV_BF16) { return bfloat16(first) | (bfloat16(second) << 16u); }
  return bitcast<u32>(first);
}
fn unpack(word: u32) -> vec2f {
  if (KV_BF16) { return vec2f(bitcast<f32>(word << 16u), bitcast<f32>(word & 0xffff0000u)); }
  return vec2f(bitcast<f32>(word), 0.0);
}
