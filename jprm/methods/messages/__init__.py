"""Chat messages with roles and tools: trajectories and free text as records, trees and token ids.

The core stores a node's role, but calls this package if a record has messages (`jprm.tree.MESSAGES`).
"""

from jprm.methods.messages.free_text import chain_of, sample_of
from jprm.methods.messages.records import is_trajectory, record_of_messages, tree_of_messages

__all__ = ["chain_of", "is_trajectory", "record_of_messages", "sample_of", "tree_of_messages"]
