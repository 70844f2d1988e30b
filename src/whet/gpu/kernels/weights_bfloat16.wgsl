// Inputs 2 i and 2 i + 1 of output j of a panel are the halves of word 16 i + j.
const HAS_OFFSETS = false;
struct Eight { low: vec4f, high: vec4f }

fn scales(panel: u32, step: u32, j: u32) -> vec4f { return vec4f(1.0, 1.0, 0.0, 0.0); }
fn pair(panel: u32, i: u32, j: u32) -> vec2f {  // i: even
  if (i >= K) { return vec2f(0.0); }
  let word = weights[panel * PANEL_WORDS + 8u * i + j];
  return vec2f(bitcast<f32>(word << 16u), select(0.0, bitcast<f32>(word & 0xffff0000u), i + 1u < K));
}
fn integers(panel: u32, step: u32, w: u32, j: u32) -> Eight {
  let i = 32u * step + 4u * w;
  return Eight(vec4f(pair(panel, i, j), pair(panel, i + 2u, j)),
               vec4f(pair(panel, i + 16u, j), pair(panel, i + 18u, j)));
}
