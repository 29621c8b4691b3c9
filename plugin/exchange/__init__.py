"""Moving whole packs between the ranks of a data-parallel group. No plan is made here, and no loader is read.

1. `metadata`: 24 bytes a pack, gathered from all ranks. `settings`: what ranks must have been started with alike.
2. `moves`: a plan becomes moves, in slices that fit a memory budget; each rank gets its routes. Packs in place do not move.
3. `transport`: one job for each global batch. gloo carries it in the background thread; `staged` on a device, launched by the
   trainer's thread.
4. `group`: the gloo group all of that talks over, and how a rank learns that another died.
"""
