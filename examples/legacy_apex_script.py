"""An ordinary training script of 2019, written for Apex. One line of it has changed: the import of amp.

    python examples/legacy_apex_script.py                      # O1
    python examples/legacy_apex_script.py --opt-level O2
    python examples/legacy_apex_script.py --opt-level O2 --resume out/legacy_apex_script/checkpoint.pt --epochs 8

Everything else is as such scripts are: a module that is trained in place, an optimizer of torch, `amp.initialize`,
`amp.scale_loss` around the backward pass, gradients clipped on `amp.master_params`, and the state of amp in the
checkpoint. New code is better written with `fmp.train_step`; this is for code that exists.
"""

import argparse
import math
import os
import pickle

import torch
import torch.nn as nn
import torch.nn.functional as F
from mnist import read_mnist
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from fmp.compat import amp  # was: from apex import amp


class Net(nn.Module):
    """A perceptron with two hidden layers."""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(784, 128)
        self.bn1 = nn.BatchNorm1d(128)
        self.fc2 = nn.Linear(128, 64)
        self.bn2 = nn.BatchNorm1d(64)
        self.fc3 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.bn1(self.fc1(x.flatten(1))))
        x = F.relu(self.bn2(self.fc2(x)))
        return self.fc3(x)


def make_loaders(args):
    images, labels = read_mnist()
    images = images.float() / 255
    held_out = torch.arange(len(labels)) % 5 == 0
    train = TensorDataset(images[~held_out], labels[~held_out])
    test = TensorDataset(images[held_out], labels[held_out])
    return (
        DataLoader(train, batch_size=args.batch_size, shuffle=True, drop_last=True),
        DataLoader(test, batch_size=250),
    )


def train(args, model, device, loader, optimizer, epoch):
    model.train()
    total = 0.0
    for data, target in tqdm(loader, desc=f"epoch {epoch}", mininterval=0.5):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.clip)
        optimizer.step()
        total += loss.item()
    return total / len(loader)


def test(model, device, loader):
    model.eval()
    correct = 0
    with torch.no_grad():
        for data, target in loader:
            data, target = data.to(device), target.to(device)
            correct += (model(data).argmax(1) == target).sum().item()
    return 100.0 * correct / len(loader.dataset)


def make_parser():
    parser = argparse.ArgumentParser(description="MNIST with Apex amp")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--opt-level", type=str, default="O1")
    parser.add_argument("--keep-batchnorm-fp32", type=str, default=None)
    parser.add_argument("--loss-scale", type=str, default=None)
    parser.add_argument("--resume", type=str, default=None)
    parser.add_argument("--output", type=str, default="out/legacy_apex_script")
    return parser


def check(args):
    """Returns what is wrong with the arguments, or None."""
    if not 2 <= args.batch_size <= 4000:
        return f"argument --batch-size: must be from 2 to 4000, the number of images, got {args.batch_size}"
    if args.epochs < 1:
        return f"argument --epochs: must be at least 1, got {args.epochs}"
    if not 0 < args.lr < math.inf:
        return f"argument --lr: must be above 0 and finite, got {args.lr}"
    if not 0 <= args.momentum < 1:
        return f"argument --momentum: must be at least 0 and below 1, got {args.momentum}"
    if not args.clip > 0:
        return f"argument --clip: must be above 0, got {args.clip}"
    if not 0 <= args.seed < 2**32:
        return f"argument --seed: must be at least 0 and below 2**32, got {args.seed}"
    if args.resume and not os.path.isfile(args.resume):
        return f"argument --resume: there is no file {args.resume}"
    return None


def main():
    parser = make_parser()
    args = parser.parse_args()
    problem = check(args)
    if problem:
        parser.error(problem)
    try:
        os.makedirs(args.output, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --output: {error}")
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_loader, test_loader = make_loaders(args)

    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
    try:
        model, optimizer = amp.initialize(
            model,
            optimizer,
            opt_level=args.opt_level,
            keep_batchnorm_fp32=args.keep_batchnorm_fp32,
            loss_scale=args.loss_scale,
        )
    except (AssertionError, RuntimeError, ValueError) as error:
        parser.error(str(error))

    first = 0
    if args.resume:
        try:
            checkpoint = torch.load(args.resume, map_location=device)
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            amp.load_state_dict(checkpoint["amp"])
            first = checkpoint["epoch"]
        except (EOFError, LookupError, OSError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError) as error:
            reason = str(error).partition("\n")[0]
            parser.error(f"argument --resume: {args.resume} is no checkpoint of this script: {reason}")
        if first >= args.epochs:
            parser.error(f"argument --epochs: {args.resume} has {first} already, so give more, got {args.epochs}")

    for epoch in range(first, args.epochs):
        loss = train(args, model, device, train_loader, optimizer, epoch)
        accuracy = test(model, device, test_loader)
        print(f"epoch {epoch}  loss {loss:.6f}  accuracy {accuracy:.2f}")
        checkpoint = {
            "epoch": epoch + 1,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "amp": amp.state_dict(),
        }
        torch.save(checkpoint, os.path.join(args.output, "checkpoint.pt"))


if __name__ == "__main__":
    main()
