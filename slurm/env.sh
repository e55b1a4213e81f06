# shellcheck shell=bash
# Settings of NCCL and JAX for jobs over several nodes, each with its reason. The sbatch files source it; variables that
# are set already stay as they are.

# NVLS is NVLink multicast. It is set up by the fabric manager for all GPUs of a node together, so on shared nodes a job
# that dies within it can take the GPUs of others down. The collectives of this library are a few KB: they gain nothing.
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}

# A warning says why a connection failed; INFO says which network was chosen (set it when links are slow).
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}

# Not set here: NCCL_P2P_NVL_CHUNKSIZE, by which a ring's transfers run at the link's rate. The commands set it where it
# is not (tree_attn/measure/links.py says why).

# Not set, for no value is right everywhere: NCCL_SOCKET_IFNAME and NCCL_IB_HCA. Where NCCL or Gloo picks a network that
# does not reach the other nodes (docker0, a management network), name the one that does: NCCL_SOCKET_IFNAME=ib0.

# Compiled programs outlive the job: a requeued job goes on within seconds, not minutes.
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/tree-attn/compiled}

# Python buffers 8 KB of output to a file; a rank that is killed would lose its last lines.
export PYTHONUNBUFFERED=1

# On a crash in native code (NCCL, XLA), every thread's Python stack goes to the rank's log.
export PYTHONFAULTHANDLER=1

# A rule, not a setting: no --gpus-per-task and no CUDA_VISIBLE_DEVICES per task. JAX gives task i of a node the node's
# i-th GPU, so every task must see them all (jax#23452, #28194): ask for --gpus-per-node or --gres=gpu:N.
