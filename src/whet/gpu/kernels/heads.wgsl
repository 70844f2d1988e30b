// Norms and rotates the heads of a token: queries in place, keys into its page, with their values.
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3u, @builtin(local_invocation_index) index: u32) {
  let lane = index % 64u;
  let team = index / 64u;
  let own = TEAMS * group.x + team;
  let is_used = own < N_HEADS + N_OWN;
  let i = select(0u, own, is_used);
  prepare(group.y, i, team, lane);
  for (var e = lane; e < D && is_used && i < N_HEADS; e += 64u) {
    qkv[head_at(group.y, i) + e] = query_scale(group.y) * head[team * D + e];
  }
  if (N_OWN > 0u) { append(group.y, i, is_used, team, lane); }
}
