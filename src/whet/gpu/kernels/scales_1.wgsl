// d u + m
const GROUP_WORDS = 16u;

fn scales(panel: u32, step: u32, j: u32) -> vec4f {
  let at = scales_at(panel, step);
  let d = half_at(at, j);
  let m = half_at(at + 8u, j);
  return vec4f(d, d, m, m);
}
