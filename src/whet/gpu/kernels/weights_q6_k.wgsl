// (d s) (u - 32), with a signed s for 16 inputs
const MORE_BITS = 2u;
const GROUP_WORDS = 72u;

fn scales(panel: u32, step: u32, j: u32) -> vec4f {
  let at = scales_at(panel, step / 8u);
  let d = half_at(at + 64u, j);
  let factors = at + 8u * (step % 8u);
  let low = d * f32(i32(byte_at(factors, j) << 24u) >> 24u);
  let high = d * f32(i32(byte_at(factors + 4u, j) << 24u) >> 24u);
  return vec4f(low, high, -32.0 * low, -32.0 * high);
}
