"""What Transformers' own model tests cover, on injected models.

Here: forward and every gradient, caches (dynamic, static, recorded and cropped, going on from one, handed between models),
padding left, right and in between, greedy, beams, sampling, assisted decoding, checkpointing of both kinds, training, heads,
multimodal wrapping, save and load, device maps by hooks, adapters, FSDP2, dtypes, autocast, compilation.

Not here, and why: contrastive search, constrained beams and their like (they only reorder a cache, as beams do); quantised
and offloaded caches (Transformers' layers of recurrent states have no such form beyond hooks); quantised weights (they need a
GPU; projections are called as modules, as with LoRA); `torch.export` and ONNX (a kernel behind Python is no graph);
attention backends other than sdpa (not what is injected); model parallelism over several GPUs and timings (tests/gpu, bench).
"""
