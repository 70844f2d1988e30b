// 2^(e - 128) q, with q twice an E2M1 number: four words of a step of an output, then bytes e per step.
const HAS_OFFSETS = false;
struct Eight { low: vec4f, high: vec4f }

fn scales(panel: u32, step: u32, j: u32) -> vec4f {
  let word = weights[panel * PANEL_WORDS + 64u * PANEL_STEPS + 4u * step + j / 4u];
  let scale = ldexp(1.0, i32((word >> (8u * (j % 4u))) & 0xffu) - 128);
  return vec4f(scale, scale, 0.0, 0.0);
}
fn numbers(nibbles: u32) -> vec4f {
  let sign = vec4f(1.0) - 2.0 * vec4f(unpack4xU8((nibbles >> 3u) & 0x01010101u));
  let u = vec4f(unpack4xU8(nibbles & 0x07070707u));  // 0 1 2 3 4 6 8 12
  return sign * (u + max(u - 4.0, vec4f(0.0)) + 2.0 * max(u - 6.0, vec4f(0.0)));
}
fn integers(panel: u32, step: u32, w: u32, j: u32) -> Eight {
  let word = weights[panel * PANEL_WORDS + 64u * step + 16u * w + j];
  return Eight(numbers(word & 0x0f0f0f0fu), numbers((word >> 4u) & 0x0f0f0f0fu));
}
