"""What the servers share: who may call and how much, errors, and the look of their pages."""
