"""Agents: trajectories (messages and free text, as records, trees and token ids), logs, environments and acting.

The core knows that a node may have a role, and asks for the rest where a record has messages (`jprm.tree.MESSAGES`).
"""

from jprm.methods.agents.free_text import chain_of
from jprm.methods.agents.records import is_trajectory, record_of_messages, tree_of_messages

__all__ = ["chain_of", "is_trajectory", "record_of_messages", "tree_of_messages"]
