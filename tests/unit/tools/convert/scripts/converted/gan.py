import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
import lockstep

latent_dim = 8
n_epochs = 2
cuda = torch.cuda.is_available()


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(latent_dim, 32), nn.LeakyReLU(0.2), nn.Linear(32, 16), nn.Tanh())

    def forward(self, z):
        return self.model(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1), nn.Sigmoid())

    def forward(self, img):
        return self.model(img)

with lockstep.Run("gan", seed=0, replicas=4) as run:
    # Loss function
    adversarial_loss = torch.nn.BCELoss()

    # Initialize generator and discriminator
    generator = run.model(Generator())
    discriminator = run.model(Discriminator())

    if cuda:
        generator.cuda()
        discriminator.cuda()
        adversarial_loss.cuda()

    # Configure data loader
    images = torch.tanh(torch.randn(128, 16) + 1)
    dataloader = run.loader(DataLoader(TensorDataset(images, torch.zeros(128)), batch_size=32, shuffle=True))

    # Optimizers
    optimizer_G = run.optimizer(torch.optim.Adam(generator.parameters(), lr=0.002, betas=(0.5, 0.999)))
    optimizer_D = run.optimizer(torch.optim.Adam(discriminator.parameters(), lr=0.002, betas=(0.5, 0.999)))

    # ----------
    #  Training
    # ----------

    for epoch in run.epochs(n_epochs):
        for i, batch in enumerate(run.batches(dataloader)):
            kept = []  # of each microbatch, for the second pass
            for (imgs, _) in batch:

                # Adversarial ground truths
                valid = torch.ones(imgs.size(0), 1, device=imgs.device)
                fake = torch.zeros(imgs.size(0), 1, device=imgs.device)

                # -----------------
                #  Train Generator
                # -----------------

                optimizer_G.zero_grad()

                # Sample noise as generator input
                z = torch.randn(imgs.size(0), latent_dim, device=imgs.device)

                # Generate a batch of images
                gen_imgs = generator(z)

                # Loss measures generator's ability to fool the discriminator
                g_loss = adversarial_loss(discriminator(gen_imgs), valid)

                run.backward(g_loss)
                optimizer_G.step()
                kept.append((valid, fake, gen_imgs, g_loss))
            for (imgs, _), (valid, fake, gen_imgs, g_loss) in zip(batch, kept):
                # ---------------------
                #  Train Discriminator
                # ---------------------

                optimizer_D.zero_grad()

                # Measure discriminator's ability to classify real from generated samples
                real_loss = adversarial_loss(discriminator(imgs), valid)
                fake_loss = adversarial_loss(discriminator(gen_imgs.detach()), fake)
                d_loss = (real_loss + fake_loss) / 2

                run.backward(d_loss)
                optimizer_D.step()

                print(f"[Epoch {epoch}/{n_epochs}] [Batch {i}/{len(dataloader)}] [D loss: {d_loss.item()}] [G loss: {g_loss.item()}]")
