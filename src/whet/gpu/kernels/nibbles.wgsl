// Nibbles, with MORE_BITS above them. A step of an output has STEP_WORDS words: 0 to 3 have the nibbles of inputs 4 w
// (low) and 16 + 4 w (high), the others the bits above. Groups of GROUP_WORDS words follow, of scales.
const HAS_OFFSETS = true;
const STEP_WORDS = 4u + MORE_BITS;
struct Eight { low: vec4f, high: vec4f }

fn scales_at(panel: u32, group: u32) -> u32 {
  return panel * PANEL_WORDS + 16u * STEP_WORDS * PANEL_STEPS + GROUP_WORDS * group;
}
fn half_at(at: u32, j: u32) -> f32 { return unpack2x16float(weights[at + j / 2u])[j % 2u]; }
fn byte_at(at: u32, j: u32) -> u32 { return (weights[at + j / 4u] >> (8u * (j % 4u))) & 0xffu; }
fn bits_above(at: u32, v: u32) -> u32 {  // of vector v of 8
  if (MORE_BITS == 1u) { return ((weights[at + 64u] >> v) & 0x01010101u) << 4u; }
  if (MORE_BITS == 2u) { return ((weights[at + 64u + 16u * (v / 4u)] >> (2u * (v % 4u))) & 0x03030303u) << 4u; }
  return 0u;
}
fn integers(panel: u32, step: u32, w: u32, j: u32) -> Eight {
  let at = panel * PANEL_WORDS + 16u * STEP_WORDS * step + j;
  let word = weights[at + 16u * w];
  return Eight(vec4f(unpack4xU8((word & 0x0f0f0f0fu) | bits_above(at, w))),
               vec4f(unpack4xU8(((word >> 4u) & 0x0f0f0f0fu) | bits_above(at, 4u + w))));
}
