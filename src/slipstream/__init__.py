"""What would make this PyTorch model cheaper, by how much, and is that true?"""
