"""What runs a policy, names it, and checks what it asks for."""
