// Float16 scales per step after all steps.
fn scales(panel: u32, step: u32, j: u32) -> vec4f {
  let d = unpack2x16float(weights[panel * PANEL_WORDS + 128u * PANEL_STEPS + 8u * step + j / 2u])[j % 2u];
  return vec4f(d, d, 0.0, 0.0);
}
