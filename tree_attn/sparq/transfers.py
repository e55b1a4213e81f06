"""Elements that sparse attentions move per KV head and decoding step, as SparQ Attention counts them.

Symbols: S keys, head dim d_h, r components, k kept keys.

Source: SparQ Attention, equations 3 and 11, and appendix G.
"""

from tree_attn.cost.equations import check_positive


def dense_transfer_elements(*, num_keys: int, head_dim: int) -> int:
    """Returns `2 S d_h + 2 d_h`: dense attention reads K and V, and writes one key and one value.

    Source: SparQ Attention, equation 3.
    """
    check_positive(num_keys=num_keys, head_dim=head_dim)
    return 2 * num_keys * head_dim + 2 * head_dim


def sparq_transfer_elements(*, num_keys: int, head_dim: int, num_components: int, num_kept: int) -> int:
    """Returns `S r + 2 k d_h + 4 d_h`: SparQ reads r components of every key, and k keys and values whole.

    It also writes a key and a value, and reads and writes the mean value.

    Example:
      >>> sparq_transfer_elements(num_keys=4096, head_dim=128, num_components=32, num_kept=128)
      164352

    Source: SparQ Attention, equation 11.
    """
    check_positive(num_keys=num_keys, head_dim=head_dim, num_components=num_components, num_kept=num_kept)
    return num_keys * num_components + 2 * num_kept * head_dim + 4 * head_dim


def h2o_transfer_elements(*, num_keys: int, head_dim: int, num_kept: int) -> int:
    """Returns `2 k d_h + 2 d_h + 2 S`: H2O also reads and writes a score of every key.

    Source: SparQ Attention, appendix G.
    """
    check_positive(num_keys=num_keys, head_dim=head_dim, num_kept=num_kept)
    return 2 * num_kept * head_dim + 2 * head_dim + 2 * num_keys


def lm_infinite_transfer_elements(*, head_dim: int, num_kept: int) -> int:
    """Returns `2 k d_h + 2 d_h`: LM-Infinite reads the kept keys and values only.

    Source: SparQ Attention, appendix G.
    """
    check_positive(head_dim=head_dim, num_kept=num_kept)
    return 2 * num_kept * head_dim + 2 * head_dim


def flexgen_transfer_elements(*, num_keys: int, head_dim: int, num_kept: int) -> int:
    """Returns `S d_h + k d_h + 2 d_h`: FlexGen's top-k reads all of K, and the kept values.

    Source: SparQ Attention, appendix G.
    """
    check_positive(num_keys=num_keys, head_dim=head_dim, num_kept=num_kept)
    return num_keys * head_dim + num_kept * head_dim + 2 * head_dim
