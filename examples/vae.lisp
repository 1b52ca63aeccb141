;;; A variational autoencoder on 8x8 images of handwritten digits (Kingma and Welling 2014).
;;; Shows a draw inside the loss (`random-normal`), through which gradients pass by its mean and deviation; `kl-gaussian`;
;;; and a layer with several results. Draws are a function of seed and step, so a resumed run repeats them.
;;;
;;;     sexpgpu run examples/vae.lisp
(import "nn" "optim" "loss")

(defknob latent 8 "numbers in the code of an image" :min 1)
(defknob hidden 128 "units of the hidden layers" :min 1)
(defknob beta 1 "weight of the divergence (beta-VAE above 1)" :min 0)
(defknob lr 2e-3 "learning rate")
(defknob batch 64 "samples in a step")
(defknob steps 1000 "steps of the run")
(defknob seed 1 "seed of the run")
(defknob precision f32 "arithmetic" :one-of (f32 tf32 bf16 f64))

(defdata digits
  (csv "data/digits.csv.gz" :fields ((image f32 [64] :scale 1/16)))
  :split ((train 4/5) (valid 1/5)))

;; Mean and logarithm of the variance of the code.
(deflayer encoder (image)
  (let ((h (relu (linear image hidden :name "in"))))
    (list (linear h latent :name "mean") (linear h latent :name "log-variance"))))

;; Logits of the pixels.
(deflayer decoder (code)
  (linear (relu (linear code hidden :name "in")) 64 :name "out"))

;; A code of the distribution: the draw has no gradient, mean and deviation do.
(defun sample (mu log-variance)
  (+ mu (* (exp (* 1/2 log-variance)) (random-normal mu))))

;; (list reconstruction divergence), both in nats an image.
(defun parts (image)
  (destructuring-bind (mu log-variance) (encoder image)
    (list (* 64 (bce (decoder (sample mu log-variance)) image))
          (kl-gaussian mu log-variance))))

(defun vae-loss (image)
  (destructuring-bind (reconstruction divergence) (parts image)
    (+ reconstruction (* beta divergence))))

(defun reconstruction (image) (first (parts image)))
(defun divergence (image) (second (parts image)))

(defrun train
  :data (batches digits :split train :batch batch :shuffle true)
  :loss vae-loss
  :optimizer (adam :lr lr)
  :steps steps
  :seed seed
  :precision precision
  :checkpoint-every 250)

(defeval valid
  :data (batches digits :split valid :batch 128)
  :every 100
  :metrics ((loss vae-loss) (reconstruction reconstruction) (divergence divergence)))
