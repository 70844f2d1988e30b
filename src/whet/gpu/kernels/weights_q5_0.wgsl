// d (u - 16)
const MORE_BITS = 1u;
const GROUP_WORDS = 8u;

fn scales(panel: u32, step: u32, j: u32) -> vec4f {
  let d = half_at(scales_at(panel, step), j);
  return vec4f(d, d, -16.0 * d, -16.0 * d);
}
