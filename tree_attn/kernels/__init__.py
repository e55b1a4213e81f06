"""All Mosaic GPU kernels, with what plans a call of them.

This package imports nothing of ours but its own files and the state's formula (`tree_attn.state`). Outside of it, it is
imported inside functions only: Mosaic is then loaded when a kernel is made, and never on a machine that runs none.

    lean_call      plans and runs a call of the lean kernel or the many-query kernel: the entry from `tree_attn.local`
    lean, lean_walk, lean_moves, lean_merge, lean_layout, query_layout, schedule, tuning    LeanAttention
    lean_prefix    how LeanAttention's output tiles begin with the states over a shared prefix
    mma, columns, warps    products by `mma.sync`, what passes through shared memory, and single threads, in PTX
    tall, tall_cta, tall_merge    the many-query kernel: rows of many queries, or of a few in a large group
    exchange, epilogue    the exchange of `reduction="fused"`, as a kernel and as the lean kernel's end
    few_rows_call, few_rows, few_rows_layout, few_rows_sum    products of few rows with weights, and what goes with them
    few_rows_chain_call, few_rows_chain, few_rows_chain_layout    several of them in one launch
    few_rows_layers_call, few_rows_layers, few_rows_of_layers    several layers in one launch
    sparq_shape, sparq_components, sparq_select, sparq_lists, sparq_top_k, sparq_attend    SparQ Attention
    launch_order, overlap    the order of launches, and launches that overlap
    registers, mlir, interpreter    what kernels share
"""
