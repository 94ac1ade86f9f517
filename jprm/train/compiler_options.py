"""Options of XLA's compilers for the training step, by backend."""

OPTIONS: dict[str, dict[str, bool | str]] = {
    # Eigen's float32 products instead of YNNPACK's: 20 to 60 % faster at the sizes of a row of 8,192 tokens, and a
    # training step of three layers of SmolLM2-135M in 7.1 s in place of 9.1 on 2 cores. Scoring goes without: it is
    # as fast, and Eigen's last digits follow the number of devices, so that several processes would not write the bytes
    # of one.
    "cpu": {"xla_cpu_experimental_ynn_fusion_type": ""},
    "tpu": {
        # Without them weights that are split over a whole 4 x 4 x 4 slice are gathered as a sum of arrays that are zero
        # elsewhere, which sends twice the bytes.
        "xla_enable_async_all_gather": True,
        "xla_tpu_prefer_async_allgather_to_allreduce": True,
        # Rings of permutes around products in 16 or 32 pieces read the activations as often: of Llama-3.1-8B on v5p-64
        # the least time for HBM is 3.0 s a step with them, longer than computing takes, and 0.6 s without.
        "xla_tpu_enable_windowed_einsum_for_all_gather": False,
        "xla_tpu_enable_windowed_einsum_for_reduce_scatter": False,
        # The SparseCores of v5p, v6e and tpu7x gather weights and scatter the sums of gradients, over all rings of a
        # torus and beside the products. (Gathers that are fused with products are for v5e alone, which does so by
        # itself: libtpu 0.0.50 refuses them elsewhere, for wrong results.) Of several rings gradients would be summed
        # whole in every chip and sliced; v5e too scatters them with these options. See `jprm.model.mesh.whole`.
        "xla_tpu_enable_sparse_core_collective_offload_all_gather": True,
        "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather": True,
        "xla_tpu_enable_sparse_core_collective_offload_3d_all_gather": True,
        "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": True,
        "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter": True,
        # How SparseCores work wherever MaxText lets them send (its benchmarks/xla_flags_library.py).
        "xla_tpu_use_tc_device_shape_on_sc": True,
        "xla_sc_disable_megacore_partitioning": True,
        "xla_sc_enable_instruction_fusion": False,
    },
}
