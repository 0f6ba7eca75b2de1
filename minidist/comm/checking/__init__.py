"""`check=True`: ranks compare what they call, and a deadlock is named."""
