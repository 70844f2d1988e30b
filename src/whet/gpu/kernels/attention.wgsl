// Softmax attention of HEADS query heads of one KV head and token over the pages of its sequence. Each of the TEAMS reads
// every fourth page, then their outputs are combined. A lane of a team has a key of the page, then up to LANE_WORDS words
// of the output. PREPARES, of a single token: its heads are normed, rotated and appended first, as in heads.wgsl.
@group(0) @binding(6) var<storage, read_write> out: array<f32>;
const LANE_WORDS = (KV_WORDS + 63u) / 64u;
const LOWEST = -3e38f;
var<workgroup> queries: array<f32, HEADS * ELEMENTS * KV_WORDS>;
var<workgroup> weights: array<f32, HEADS * 64u * TEAMS>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) index: u32) {
  let lane = index % 64u;
  let team = index / 64u;
  let token = tokens[group.y];
  let position = u32(token.y);
  let first_head = group.x * HEADS;
  let kv_head = first_head / (N_HEADS / N_KV_HEADS);
  let row = group.y * QKV_DIM + first_head * QUERY_STRIDE;
  for (var first = 0u; first < HEADS; first += TEAMS) {
    let h = min(first + team, HEADS - 1u);
    if (PREPARES) { prepare(group.y, first_head + h, team, lane); }
    for (var e = lane; e < ELEMENTS * KV_WORDS && first + team < HEADS; e += 64u) {
      var value = 0.0;
      if (e < D && PREPARES) { value = query_scale(group.y) * head[team * D + e]; }
      if (e < D && !PREPARES) { value = qkv[row + h * QUERY_STRIDE + e]; }
      queries[h * ELEMENTS * KV_WORDS + e] = SCALE * value;
    }
  }
  if (PREPARES && N_OWN > 0u) {
    prepare(group.y, N_HEADS + kv_head, team, lane);
    append(group.y, N_HEADS + kv_head, team == 0u, team, lane);
    storageBarrier();
  }
  workgroupBarrier();
  var begin = 0u;
  if (WINDOW > 0u && position + 1u > WINDOW) { begin = position + 1u - WINDOW; }
  var top = array<f32, HEADS>();
  var sum = array<f32, HEADS>();
  var output = array<vec2f, HEADS * LANE_WORDS>();
  for (var h = 0u; h < HEADS; h++) { top[h] = LOWEST; }
  for (var first = begin / 64u; first <= position / 64u; first += TEAMS) {
    let p = first + team;
    let t = 64u * p + lane;
    var n = 0u;  // tokens of the page
    var page = 0u;
    if (p <= position / 64u) {
      n = min(64u, position + 1u - 64u * p);
      page = page_at(page_table[u32(token.z) + p], kv_head);
    }
    var score = array<f32, HEADS>();
    for (var w = 0u; w < KV_WORDS && n > 0u; w++) {
      let key = unpack(kv[page + 64u * w + lane]);
      for (var h = 0u; h < HEADS; h++) {
        let at = (h * KV_WORDS + w) * ELEMENTS;
        score[h] += queries[at] * key.x;
        if (KV_BF16) { score[h] += queries[at + ELEMENTS - 1u] * key.y; }
      }
    }
    for (var h = 0u; h < HEADS; h++) {
      if (SOFTCAP > 0.0) { score[h] = SOFTCAP * tanh(clamp(score[h] / SOFTCAP, -20.0, 20.0)); }
      if (t < begin || t > position) { score[h] = LOWEST; }
      weights[64u * (TEAMS * h + team) + lane] = score[h];
    }
    workgroupBarrier();
    for (var h = 0u; h < HEADS; h++) {
      let before = top[h];
      for (var i = 0u; i < 64u; i++) { top[h] = max(top[h], weights[64u * (TEAMS * h + team) + i]); }
      let scale = exp(before - top[h]);
      sum[h] *= scale;
      for (var w = 0u; w < LANE_WORDS; w++) { output[h * LANE_WORDS + w] *= scale; }
    }
    workgroupBarrier();
    for (var h = 0u; h < HEADS; h++) {
      weights[64u * (TEAMS * h + team) + lane] = select(exp(score[h] - top[h]), 0.0, score[h] == LOWEST);
    }
    workgroupBarrier();
    for (var i = 0u; i < n; i++) {
      for (var h = 0u; h < HEADS; h++) { sum[h] += weights[64u * (TEAMS * h + team) + i]; }
      for (var w = 0u; w < LANE_WORDS; w++) {
        if (64u * w + lane >= KV_WORDS) { break; }
        let value = unpack(kv[page + HEAD_WORDS + i * KV_WORDS + 64u * w + lane]);
        for (var h = 0u; h < HEADS; h++) { output[h * LANE_WORDS + w] += weights[64u * (TEAMS * h + team) + i] * value; }
      }
    }
    workgroupBarrier();
  }
  for (var h = 0u; h < HEADS; h++) {
    weights[2u * (TEAMS * h + team)] = top[h];
    weights[2u * (TEAMS * h + team) + 1u] = sum[h];
  }
  workgroupBarrier();
  var scale = array<f32, HEADS>();  // of the team's output
  for (var h = 0u; h < HEADS; h++) {
    var most = LOWEST;
    if (HAS_SINKS) { most = vectors[SINKS + first_head + h]; }
    for (var i = 0u; i < TEAMS; i++) { most = max(most, weights[2u * (TEAMS * h + i)]); }
    var all = 0.0;
    if (HAS_SINKS) { all = exp(vectors[SINKS + first_head + h] - most); }
    for (var i = 0u; i < TEAMS; i++) {
      let at = 2u * (TEAMS * h + i);
      all += weights[at + 1u] * exp(weights[at] - most);
    }
    scale[h] = exp(top[h] - most) / all;
  }
  for (var w = 0u; w < LANE_WORDS * ELEMENTS; w++) {
    workgroupBarrier();
    for (var h = 0u; h < HEADS; h++) {
      weights[64u * (TEAMS * h + team) + lane] = scale[h] * output[h * LANE_WORDS + w / ELEMENTS][w % ELEMENTS];
    }
    workgroupBarrier();
    let d = (64u * (w / ELEMENTS) + lane) * ELEMENTS + w % ELEMENTS;
    for (var h = team; h < HEADS && d < D; h += TEAMS) {
      var value = 0.0;
      for (var i = 0u; i < TEAMS; i++) { value += weights[64u * (TEAMS * h + i) + lane]; }
      if (IS_GATED) { value /= 1.0 + exp(-qkv[row + h * QUERY_STRIDE + D + d]); }
      out[(group.y * N_HEADS + first_head + h) * D + d] = value;
    }
  }
}
