// Input i of output j of a panel is word 16 i + j.
const HAS_OFFSETS = false;
struct Eight { low: vec4f, high: vec4f }

fn scales(panel: u32, step: u32, j: u32) -> vec4f { return vec4f(1.0, 1.0, 0.0, 0.0); }
fn one(panel: u32, i: u32, j: u32) -> f32 {
  if (i < K) { return bitcast<f32>(weights[panel * PANEL_WORDS + 16u * i + j]); }
  return 0.0;
}
fn four(panel: u32, i: u32, j: u32) -> vec4f {
  return vec4f(one(panel, i, j), one(panel, i + 1u, j), one(panel, i + 2u, j), one(panel, i + 3u, j));
}
fn integers(panel: u32, step: u32, w: u32, j: u32) -> Eight {
  let i = 32u * step + 4u * w;
  return Eight(four(panel, i, j), four(panel, i + 16u, j));
}
