"""Options of XLA's compilers, by backend, for the programs that are products over whole rows: training and scoring."""

OPTIONS: dict[str, dict[str, bool | str]] = {
    # Eigen's float32 products in place of YNNPACK's: 20 to 60 % faster at the sizes of a row of 8,192 tokens, and a
    # training step of three layers of SmolLM2-135M in 7.1 s in place of 9.1 on 2 cores. (A few tokens at a time, as in
    # decoding, YNNPACK is as fast or faster.)
    "cpu": {"xla_cpu_experimental_ynn_fusion_type": ""},
    # Without them weights that are split over a whole 4 x 4 x 4 slice are gathered as a sum of arrays that are zero
    # elsewhere, which sends twice the bytes.
    "tpu": {
        "xla_enable_async_all_gather": True,
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
        "xla_tpu_prefer_async_allgather_to_allreduce": True,
    },
}
